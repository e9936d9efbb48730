"""Compute all Pareto-optimal (weight, value) pairs of a knapsack in one run.

One run replaces a sweep over capacities: the best value for any capacity is the value of the heaviest pair that fits.
The compiled kernel computes the frontier. If the kernel is missing, NumPy computes the frontier. The kernel and NumPy
both use the algorithm of Nemhauser and Ullmann (1969), which adds one item after another. The kernel also groups
identical items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from remat.solvers.base import Solver
from remat.solvers.effort import EFFORT
from remat.solvers.graph.pareto import knee
from remat.solvers.kernel import kernel
from remat.solvers.problem import KnapsackProblem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnapsackFrontier:
    """The *points* of a knapsack: its Pareto-optimal choices within the capacity, lightest first.

    Attributes:
        weights: weight of each point, int64, strictly rising.
        values: value of each point, int64, strictly rising.
        tolerance: 0 if every Pareto-optimal choice is a point. Otherwise, for each missing choice,
            some point weighs no more and has at least the choice's value / (1 + tolerance).
    """

    weights: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]
    tolerance: float
    _items: Callable[[int], list[int]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.weights)

    def items(self, point: int) -> tuple[int, ...]:
        """Return the sorted item indices of the choice at a point of the frontier."""
        return tuple(self._items(point))

    def best_within(self, capacity: int) -> int:
        """Return the index of the most valuable point that weighs at most ``capacity``, which is at least 0."""
        return int(self.weights.searchsorted(capacity, side="right")) - 1

    def knee(self, *, by: str = "origin") -> int:
        """Return the index of the point beyond which more weight adds little value.

        The *loss* of a point is the greatest value less the point's value. Weight and loss are scaled to
        [0, 1] over the frontier. If all points have the same weight or the same value, the last index is returned.

        Args:
            by: ``"origin"``: the point nearest to zero scaled weight and zero scaled loss.
                ``"chord"``: the point farthest below the line from the lightest to the heaviest point.

        Raises:
            ProblemError: ``by`` is neither of the two.
        """
        most = int(self.values[-1])
        losses = (most - value for value in self.values.tolist())
        return knee([*zip(self.weights.tolist(), losses, strict=True)], by)


def knapsack_frontier(
    problem: KnapsackProblem, *, most_points: int = EFFORT.points
) -> KnapsackFrontier:
    """Compute the Pareto frontier of a knapsack up to its capacity.

    Args:
        problem: the knapsack.
        most_points: number of points above which some points are dropped.
            `KnapsackFrontier.tolerance` states the resulting error. At least 16.
    """
    capacity = min(problem.capacity, problem.total_weight)
    compiled = kernel()
    if compiled is None:
        return _by_numpy(problem, capacity, most_points)
    frontier = compiled.Frontier(problem.weights, problem.values, capacity, most_points)
    weights, values = frontier.points()
    return KnapsackFrontier(
        weights=weights, values=values, tolerance=frontier.tolerance, _items=frontier.items
    )


def _by_numpy(problem: KnapsackProblem, capacity: int, most: int) -> KnapsackFrontier:
    """Compute the frontier of a knapsack with NumPy; used if the compiled kernel is missing."""
    import numpy as np

    free = [i for i, w in enumerate(problem.weights) if w == 0 and problem.values[i]]
    weights = np.zeros(1, dtype=np.int64)
    values = np.full(1, problem.value_of(free), dtype=np.int64)
    # For each item, the point before it from which each point comes, and whether the point adds the item.
    history: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = []
    factor = 1.0
    for i, (w, v) in enumerate(zip(problem.weights, problem.values, strict=True)):
        if w == 0 or v == 0 or w > capacity:
            continue
        before = np.concatenate([np.arange(len(weights)), np.flatnonzero(weights <= capacity - w)])
        added = np.arange(len(before)) >= len(weights)
        weights, values = weights[before] + w * added, values[before] + v * added
        kept = np.lexsort((-values, weights))
        best_before = np.concatenate([[-1], np.maximum.accumulate(values[kept])[:-1]])
        kept = kept[values[kept] > best_before]
        if len(kept) > most:
            step = 1e-9
            while True:
                level = np.floor(np.log(np.maximum(values[kept], 1)) / np.log1p(step))
                first = np.concatenate([[True], np.diff(level) > 0])
                if first.sum() <= most // 2:  # half, so that the next item stays below `most`
                    break
                step *= 4
            kept = kept[first]
            factor *= 1 + step
        weights, values = weights[kept], values[kept]
        history.append((i, before[kept], added[kept]))

    def items(point: int) -> list[int]:
        chosen = list(free)
        for i, before, added in reversed(history):
            if added[point]:
                chosen.append(i)
            point = before[point]
        return sorted(chosen)

    return KnapsackFrontier(weights=weights, values=values, tolerance=factor - 1.0, _items=items)


class DynamicMemoryBudget(Solver):
    """Solver that returns the choice at the Pareto frontier's knee, which saves fewer bytes than the capacity allows.

    PyTorch's solver ``dynamic_memory_budget_dp`` solves the knapsack for a hundred budgets. The solver
    `DynamicMemoryBudget` computes all Pareto-optimal choices in one run.
    """

    __slots__ = ()

    name: ClassVar[str] = "dynamic_memory_budget_dp"

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> list[int]:
        # Enough points to find a knee, but few enough to be fast: at most 2e8 merged points over all items,
        # and 4e7 for each second of a time limit.
        merged = 2e8 if time_limit is None else min(2e8, 4e7 * time_limit)
        most = max(16, min(32_768, int(merged / max(1, len(problem)))))
        frontier = knapsack_frontier(problem, most_points=most)
        return list(frontier.items(frontier.knee()))
