"""Solve a knapsack by dynamic programming; the capacity is divided into a bounded number of steps.

The method is the textbook recursion over items and capacities, vectorised over capacities. PyTorch's knapsack solver
``dp`` rounds weights to the nearest of 10,000 steps, so its choice can exceed the budget. The dynamic program of remat
rounds weights up and the capacity down, so a choice always fits. Nothing is rounded if the capacity, divided by the
weights' common divisor, is at most the number of steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from remat.errors import ProblemError
from remat.solvers.knapsack.reduction import CoreSolver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.solution import Answer


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DynamicProgram(CoreSolver):
    """Solver by dynamic programming over steps of the capacity; exact if the steps are fine enough.

    Attributes:
        steps: number of equal steps into which the capacity is divided.
    """

    steps: int = 10_000

    name: ClassVar[str] = "dp"
    requires: ClassVar[tuple[str, ...]] = ("numpy",)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ProblemError(f"steps must be at least 1, got {self.steps}")

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Fill a table with the greatest value for each capacity; return its choice, or the greedy choice if that is better."""
        deadline = None if time_limit is None else time.monotonic() + time_limit
        unit = -(-core.capacity // self.steps)  # 1 (no rounding) if capacity <= steps
        # In multiples of `unit`. Weights are rounded up and the capacity down, so that a choice always fits.
        coarse = KnapsackProblem(
            weights=tuple(-(-w // unit) for w in core.weights),
            values=core.values,
            capacity=core.capacity // unit,
        )
        relaxed = core.relaxed()
        picked, is_complete = _fill_table(coarse, relaxed.order, deadline)
        saved = tuple(sorted(picked))
        if unit > 1 or not is_complete:
            saved = core.repaired(picked)  # rounding or the deadline may leave capacity unused
        value = core.value_of(saved)
        if value < relaxed.value:
            saved, value = relaxed.saved, relaxed.value
        proven = unit == 1 and is_complete
        return Answer(saved, value if proven else relaxed.bound, by_clock=not is_complete)


def _fill_table(
    problem: KnapsackProblem, order: tuple[int, ...], deadline: float | None
) -> tuple[list[int], bool]:
    """Return the most valuable choice (of equal ones, the lightest), and whether time sufficed for all items."""
    import numpy as np

    columns = problem.capacity + 1  # weights and capacity are in multiples of a step
    best = np.zeros(columns, dtype=np.int64)  # best[c]: greatest value within capacity c
    taken: list[tuple[int, np.ndarray]] = []  # per item, one bit per capacity, to save memory
    is_complete = True
    for i in order:
        if deadline is not None and time.monotonic() >= deadline:
            is_complete = False
            break
        weight, value = problem.weights[i], problem.values[i]
        if weight >= columns:
            continue
        with_item = best[: columns - weight] + value  # a copy, so that no item is taken twice
        better = np.zeros(columns, dtype=np.bool_)
        np.greater(with_item, best[weight:], out=better[weight:])
        np.maximum(best[weight:], with_item, out=best[weight:])
        taken.append((i, np.packbits(better)))

    room = int(np.argmax(best))  # argmax takes the first maximum: the lightest best choice
    picked = []
    for i, bits in reversed(taken):
        if bits[room >> 3] >> (7 - (room & 7)) & 1:
            picked.append(i)
            room -= problem.weights[i]
    return picked, is_complete
