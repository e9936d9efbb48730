"""Solve knapsacks greedily by value per weight, and schedule problems by evicting values."""

from __future__ import annotations

from remat.solvers.knapsack.reduction import CoreSolver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.schedule.eviction import evicting
from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule, not_found
from remat.solvers.solution import Answer


class Greedy(CoreSolver):
    """Solver that takes items by value per weight, best first; its choice has at least half the optimal value."""

    __slots__ = ()

    name = "greedy"

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Return the better of the two greedy choices that `Relaxation` describes; the time limit is ignored."""
        relaxed = core.relaxed()
        return Answer(relaxed.saved, relaxed.bound)

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> list[int]:
        """Schedule the nodes in the problem's order, and evict values if memory runs out; ignore the time limit."""
        schedule = evicting(problem)
        if schedule is None:
            raise not_found(problem, evaluate_schedule(problem, problem.order).peak_bytes)
        return schedule
