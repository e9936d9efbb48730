"""Greedy by value per weight."""

from __future__ import annotations

from remat.solvers.bounds import relax
from remat.solvers.eviction import evicting
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import CoreSolver
from remat.solvers.schedule_problem import ScheduleProblem, evaluate_schedule, not_found
from remat.solvers.solution import Answer


class Greedy(CoreSolver):
    """Value per weight, best first; worth at least half the optimum.

    The guarantee comes from comparing with the choice built on the most valuable single item.
    """

    __slots__ = ()

    name = "greedy"

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Take the better of the two greedy choices; one sort, so no limit applies."""
        relaxed = relax(core)
        return Answer(relaxed.saved, relaxed.bound)

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> list[int]:
        """Keep the given order and drop what is used last; no limit applies."""
        found = evicting(problem, problem.order)
        if found is None:
            raise not_found(problem, evaluate_schedule(problem, problem.order).peak_bytes)
        return found
