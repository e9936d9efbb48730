"""Greedy by value per weight."""

from __future__ import annotations

from remat.solvers.bounds import relax
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import CoreSolver
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
