from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Solve a knapsack. Returns (saved, value, bound, optimal, by_clock). `seconds` 0 means no clock. `work` and
# `states` limit the states (partial choices) created in total and kept at one time.
def solve(
    weights: Sequence[int],
    values: Sequence[int],
    capacity: int,
    seconds: float,
    work: int,
    states: int,
) -> tuple[list[int], int, int, bool, bool]: ...

# A graph problem with the loss of each choice; see `remat.solvers.graph.hull`.
class GraphCore:
    def __init__(
        self,
        sizes: Sequence[int],
        save_losses: Sequence[int],
        recompute_losses: Sequence[int],
        flags: Sequence[int],
        starts: Sequence[int],
        sources: Sequence[int],
        flows: Sequence[int],
        price: int,
    ) -> None: ...
    # Find the cheapest decision within the capacity whose loss is at most `limit`. Returns (found, complete,
    # bytes, loss, saved, work, by_clock). `most` limits the prefixes (partial decisions) kept after each node.
    def run(
        self, capacity: int, limit: int, work: int, most: int, seconds: float
    ) -> tuple[bool, bool, int, int, list[int], int, bool]: ...

# A schedule problem in the kernel's form; `remat.solvers.schedule.core.ScheduleCore.columns` gives the arguments.
class ScheduleGraph:
    def __init__(
        self,
        cost: Sequence[int],
        extra: Sequence[int],
        once: Sequence[int],
        starts: Sequence[int],
        reads: Sequence[int],
        maker: Sequence[int],
        size: Sequence[int],
    ) -> None: ...
    # Run one annealing search for each entry (seed, moves, hot, cold, wide, narrow, price) of `turns`. Returns
    # (feasible, by_clock, cost, peak, sequence) for each entry.
    def anneal(
        self,
        start: Sequence[int],
        capacity: int,
        turns: Sequence[tuple[int, int, float, float, float, float, float]],
        seconds: float,
    ) -> list[tuple[bool, bool, float, float, list[int]]]: ...

# The Pareto-optimal choices of a knapsack; see `remat.solvers.knapsack.frontier`.
class Frontier:
    def __init__(
        self, weights: Sequence[int], values: Sequence[int], capacity: int, most: int
    ) -> None: ...
    # Returns the sorted indices of the items of the choice at point `i`.
    def items(self, i: int) -> list[int]: ...
    # Returns the weights and the values of all points.
    def points(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    @property
    def tolerance(self) -> float: ...
