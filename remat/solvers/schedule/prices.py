"""Search for cheap decisions with Lagrange multipliers, which are prices of a byte at program points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


def price_between(prices: Mapping[int, float]) -> Callable[[int, int], float]:
    """Return a function that sums the prices of all program points from one to another, both included."""
    program_points = sorted(prices)
    sums = [0.0, *accumulate(prices[m] for m in program_points)]

    def priced(low: int, high: int) -> float:
        # An empty range (high below low) would otherwise give a negative difference of sums.
        return max(
            0.0,
            sums[bisect_left(program_points, high + 1)] - sums[bisect_left(program_points, low)],
        )

    return priced


def search_by_prices(
    best: T,
    rank: Callable[[T], tuple[float, int]],
    cheapest: Callable[[], T],
    move: Callable[[T, int, float], bool],
    *,
    most: int,
    cuts: int,
) -> T:
    """Return the best decision found while prices move along subgradients (a Lagrangian search).

    Args:
        best: a decision; returned if no better one is found.
        rank: sort key of a decision: its bytes above the limits, then its cost.
        cheapest: returns the cheapest decision at the current prices.
        move: moves the prices. Its arguments are the cheapest decision, an estimate of the optimal
            cost, and a factor of the change. It returns False to end the search.
        most: the first estimate of the optimal cost. The cost of the best decision within the
            limits replaces this estimate once there is such a decision.
        cuts: maximum number of calls of ``cheapest``, each of which computes a minimum cut.
    """
    factor, idle = 1.0, 0
    for _ in range(cuts):
        candidate = cheapest()
        if rank(candidate) < rank(best):
            best, idle = candidate, 0
            over, cost = rank(best)
            if not over:
                most = max(1, cost)
        else:
            # As usual in subgradient searches, halve the factor after four cuts without progress.
            idle += 1
            if idle % 4 == 0:
                factor /= 2
        if not move(candidate, most, factor):
            break
    return best
