"""Minimum cuts of a graph problem under prices for the bytes alive at each program point."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate

from remat.planning.search.candidates import Candidate
from remat.planning.search.pool import Limits
from remat.planning.search.schedules import SAVED, Schedules
from remat.solvers.graph.flow import Network

#: Price of one byte at each program point; at `SAVED`, of one saved byte.
Prices = dict[int, float]


class Cuts:
    """Minimum cuts of a graph problem under prices (Lagrange multipliers) of memory.

    A cut assumes that a value is recomputed where backward first needs anything computed from this value. If nothing on
    the way from a value to the loss is saved, backward seems to need the value at once, so recomputing the value seems
    to free no memory. *Checkpoints* are values that every cut saves. With checkpoints, a value is recomputed where
    backward first needs any value of the same segment (between two checkpoints).

    Args:
        schedules: the decisions of the graph, by the peaks of their schedules.
    """

    def __init__(self, schedules: Schedules) -> None:
        self.schedules, self.problem = schedules, schedules.problem

    @cached_property
    def _network(self) -> Network:
        """The flow network of the graph problem, on which minimum cuts are computed."""
        return Network(self.problem)

    def at(self, prices: Prices, checkpoints: frozenset[int] = frozenset()) -> Candidate:
        """Return the minimum cut under prices of memory as a decision, which also saves ``checkpoints``.

        A cut minimises recompute cost plus, over all program points, price times bytes alive.
        """
        problem = self.problem
        saving = prices.get(SAVED, 0.0)
        priced = _price_between({m: p for m, p in prices.items() if m != SAVED})
        begin, first, last = self.schedules.uses(checkpoints)
        keep, again = [], []
        for i, nbytes in enumerate(problem.size):
            free = not (nbytes and prices) or i in checkpoints
            keep.append(0.0 if free else nbytes * (saving + priced(begin[i], last[i])))
            held = nbytes * priced(first[i], last[i]) if nbytes and prices else 0.0
            again.append((problem.cost[i] if problem.in_forward[i] else 0) + held)
        most = sum(again)  # recomputing a checkpoint costs more than all else together
        for i in checkpoints:
            again[i] += most
        return self.schedules.candidate(self._network.cut_at(keep, again))

    @staticmethod
    def moved(
        prices: Prices, candidate: Candidate, limits: Limits, most: int, step_size: float = 1.0
    ) -> Prices | None:
        """Return prices (Lagrange multipliers) after a subgradient step of Polyak's length.

        Args:
            prices: the present prices.
            candidate: the best decision at these prices.
            limits: the limits.
            most: estimate of the optimal cost: the cost of the best decision found within the limits, or a higher
                number if no such decision was found.
            step_size: factor by which the step length is multiplied.

        Returns:
            The new prices. None if the subgradient is zero, such as when the decision exceeds no limit and no
            price is set.
        """
        slope = {
            m: over
            for m, b in candidate.alive.items()
            if (over := b - limits.at(m)) > 0 or m in prices
        }
        length = float(sum(s * s for s in slope.values()))
        if not length:
            return None
        value = candidate.cost + sum(prices.get(m, 0.0) * s for m, s in slope.items())
        # `most` only estimates the optimum, so the step must not vanish when `value` reaches it.
        move = step_size * max(most - value, 0.02 * most) / length
        return {m: p for m, s in slope.items() if (p := prices.get(m, 0.0) + move * s) > 0}


def _price_between(prices: Mapping[int, float]) -> Callable[[int, int], float]:
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
