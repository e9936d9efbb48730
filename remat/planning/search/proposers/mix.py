"""Propose decisions that are Pareto-optimal by (peak, cost), without a separate search for each peak.

1. Minimum cuts propose the first decisions. Cuts with one price for every saved byte are the vertices of the hull of
   the graph problem. Other cuts have a price of a byte at each program point. Prices at program points rise while the
   peak that the search aims at falls.
2. Mixtures of two neighbouring decisions are evaluated. A mixture takes the choices of one decision up to a node, and
   the other decision's choices after the node. In a model of equal layers, successive mixtures differ in a few layers.
3. For many peaks, the cheapest decision within the peak is changed to save further values, many at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT
from remat.planning.search.pool import Limits
from remat.planning.search.proposers.cuts import Cuts, Prices
from remat.planning.search.schedules import Schedules
from remat.solvers.graph.pareto import lower_hull
from remat.solvers.graph.problem import worth_saving


def by_peak(candidate: Candidate) -> tuple[int, int]:
    """Return a candidate's peak in bytes and its cost, as a sort key."""
    return candidate.peak_bytes, candidate.cost


class Mixtures:
    """Search for the decisions on one prepared graph that are Pareto-optimal by (peak, cost), for all peaks at once.

    Args:
        schedules: the decisions of the graph; decisions that are found are added to ``schedules.seen``.
    """

    def __init__(self, schedules: Schedules) -> None:
        self._schedules, self.problem = schedules, schedules.problem
        self._seen, self.candidate = schedules.seen, schedules.candidate
        self._nodes = len(schedules.context.state.index)
        self._effort = DEFAULT.all_peaks

    def find(
        self, starts: Iterable[Iterable[int]], on_progress: Callable[[str], None]
    ) -> list[Candidate]:
        """Search for the frontier by peak and cost; return its candidates, lowest peak first.

        Args:
            starts: decisions to start from, each as its saved nodes of the graph problem; at least one.
            on_progress: called with a line of text before each stage.
        """
        on_progress("scheduling cuts")
        for start in starts:
            self.candidate(start)
        self._follow(self._peaks(self._effort.peaks))
        on_progress("mixing cuts")
        self._mix()
        on_progress("adding what has room")
        self._add()
        return self._seen.pareto()

    def _peaks(self, count: int) -> list[int]:
        """Return ``count`` evenly spaced peaks between the lowest and the highest of the Pareto-optimal candidates."""
        best = self._seen.pareto()
        low, high = best[0].peak_bytes, best[-1].peak_bytes
        return [low + (high - low) * k // count for k in range(count)]

    def _cheapest(self, peak_bytes: int) -> Candidate:
        """Return the cheapest candidate within a peak, which must be at least the lowest peak of a candidate."""
        cheapest = self._seen.cheapest(Limits(peak_bytes=peak_bytes))
        assert cheapest is not None, f"a candidate has a peak of at most {peak_bytes} bytes"
        return cheapest

    def _follow(self, peaks: list[int]) -> None:
        """For each peak, evaluate minimum cuts under prices (Lagrange multipliers) of a byte at each program point."""
        cuts, prices = Cuts(self._schedules), Prices()
        # The prices for each lower peak start from the last prices for the peak before.
        for peak_bytes in reversed(peaks):
            for _ in range(self._effort.cuts):
                candidate = cuts.at(prices)
                most = max(1, self._cheapest(peak_bytes).cost)
                moved = cuts.moved(prices, candidate, Limits(peak_bytes=peak_bytes), most)
                if moved is None:
                    break
                prices = moved

    def _mix(self) -> None:
        """Evaluate mixtures of two neighbouring candidates on the lower hull of (peak, cost)."""
        best, size = lower_hull(self._seen.pareto(), by_peak), self.problem.size
        part = max(1, (best[-1].peak_bytes - best[0].peak_bytes) // self._effort.parts)
        for low, high in pairwise(best):
            parts = round((high.peak_bytes - low.peak_bytes) / part)
            differ = sorted({*low.saved} ^ {*high.saved})
            total = sum(size[i] for i in differ)
            # The layers near the loss, or those far from it, may be the cheaper ones to recompute.
            for order in (differ, differ[::-1]):
                mixed, nbytes = {*low.saved}, 0
                for i in order:
                    before, nbytes = parts * nbytes // max(1, total), nbytes + size[i]
                    mixed ^= {i}
                    if before < parts * nbytes // max(1, total) < parts:
                        self.candidate(mixed)

    def _add(self) -> None:
        """For many peaks, evaluate decisions that save more values than the cheapest candidate within the peak."""
        left = len(self._seen) + DEFAULT.evaluations(self._nodes, self._effort.least)
        targets = {
            *self._peaks(self._effort.parts),
            *(t.peak_bytes for t in self._seen.pareto()[:-1]),
        }
        # In this order, the first targets already cover the whole range, in case the evaluations run out.
        for peak_bytes in _spread(sorted(targets)):
            candidate = self._cheapest(peak_bytes)
            values = self._room(candidate, peak_bytes)
            while values and len(self._seen) < left:
                if self.candidate((*candidate.saved, *values)).peak_bytes <= peak_bytes:
                    break
                # `_room` only estimates, so it may propose too many values: keep the quarter with the highest cost per
                # byte.
                values = values[: len(values) // 4]

    def _room(self, candidate: Candidate, peak_bytes: int) -> list[int]:
        """Return recomputed values that can probably all be saved within a peak, highest cost per byte first."""
        problem, (begin, first, _) = self.problem, self._schedules.uses()
        room = np.full(self._nodes + 1, peak_bytes)
        for program_point, nbytes in candidate.alive.items():
            if program_point >= 0:
                room[program_point] -= nbytes
        values = []
        for i in worth_saving(problem, candidate.saved):
            free_bytes = room[begin[i] : first[i]]
            if problem.size[i] and free_bytes.size and free_bytes.min() >= problem.size[i]:
                free_bytes -= problem.size[i]
                values.append(i)
        return values


def _spread(items: list[int]) -> list[int]:
    """Return the items in the order of positions 0, 8, 16, …, then 1, 9, 17, …, and so on."""
    return [item for k in range(8) for item in items[k::8]]
