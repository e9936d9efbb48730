"""Saving only as much as pays: the knee of the frontier instead of the whole capacity."""

from __future__ import annotations

from typing import ClassVar

from remat.solvers.base import Solver
from remat.solvers.frontier import knapsack_frontier
from remat.solvers.problem import KnapsackProblem


class DynamicMemoryBudget(Solver):
    """The choice at the knee of the frontier below the capacity, where more memory buys little.

    The name is that of PyTorch's solver, which sweeps a hundred budgets; here the frontier is
    computed once, and its knee is exact. It saves less than it may, on purpose.
    """

    __slots__ = ()

    name: ClassVar[str] = "dynamic_memory_budget_dp"

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> list[int]:
        # Enough points for a knee, and no more than can be merged in a second or so, or in time.
        merged = 2e8 if time_limit is None else min(2e8, 4e7 * time_limit)
        most = max(16, min(32_768, int(merged / max(1, len(problem)))))
        frontier = knapsack_frontier(problem, most_points=most)
        return list(frontier.items(frontier.knee()))
