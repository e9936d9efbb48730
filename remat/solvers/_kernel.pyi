from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def solve(
    weights: Sequence[int],
    values: Sequence[int],
    capacity: int,
    seconds: float,
    work: int,
    states: int,
) -> tuple[list[int], int, int, bool, bool]: ...
def relax(
    weights: Sequence[int], values: Sequence[int], capacity: int
) -> tuple[list[int], int, list[int], int]: ...

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
    def run(
        self, capacity: int, limit: int, work: int, most: int, seconds: float
    ) -> tuple[bool, bool, int, int, list[int], int, bool]: ...
    def bound(
        self, capacity: int, limit: int, modulus: int, work: int, seconds: float
    ) -> tuple[bool, int, bool]: ...

class StepGraph:
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
    def anneal(
        self,
        start: Sequence[int],
        capacity: int,
        turns: Sequence[tuple[int, int, float, float, float, float, float]],
        seconds: float,
    ) -> list[tuple[bool, bool, float, float, list[int]]]: ...

class Frontier:
    def __init__(
        self, weights: Sequence[int], values: Sequence[int], capacity: int, most: int
    ) -> None: ...
    def items(self, i: int) -> list[int]: ...
    def points(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    @property
    def tolerance(self) -> float: ...
