"""Frontier by peak: Pareto-optimal decisions by (peak, cost), without a search for each peak.

Minimum cuts propose the first decisions. Some cuts have one price for every saved byte; they are the
vertices of the hull. Other cuts have a price per program point, and these prices are raised while the
wanted peak falls. Then mixtures of two neighbouring decisions are evaluated. A mixture takes the choices
of one decision up to a node, and those of the other decision after the node. In a model of equal layers,
successive mixtures differ in a few layers. Then further values are saved, many at a time, in decisions
whose peaks leave room. For small steps, node orders are searched, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

import numpy as np

from remat.planning.candidates import Candidate
from remat.planning.peak_search import Limits, PeakSearch
from remat.solvers.graph_problem import worth_saving
from remat.solvers.pareto import lower_hull, pareto

#: Number of peaks for which prices are adjusted, and maximum number of cuts for each peak.
_PEAKS, _CUTS = 16, 4
#: Parts into which the range of peaks is divided; mixtures and additions aim at peaks of this spacing.
_PARTS = 24
#: Limits on the evaluations of `_add`: nodes that they visit in total, and a least number of evaluations.
_WORK, _LEAST = 800_000, 24
#: Node orders are searched if the step has at most this many runs; and the number of points of the frontier from which
#: these searches start.
FEW_RUNS, _ORDERED = 1_000, 8
#: Number of intervals between the peaks at which bounds are computed.
_STEPS = 64


def by_peak(found: Candidate) -> tuple[int, int]:
    """Return the (peak bytes, cost) of a candidate."""
    return found.peak_bytes, found.cost


class PeakFrontier(PeakSearch):
    """Search over the decisions of one prepared graph for the Pareto-optimal ones by (peak, cost)."""

    def found(
        self, starts: Iterable[Iterable[int]], on_step: Callable[[str], None]
    ) -> list[Candidate]:
        """Search for the frontier; return its candidates, lowest peak first.

        Args:
            starts: decisions to start from, each as its saved nodes of the graph problem; at least one.
            on_step: called with a line of text before each stage.
        """
        on_step("scheduling cuts")
        for start in starts:
            self.tried(start)
        self._follow(self._peaks(_PEAKS))
        on_step("mixing cuts")
        self._mix()
        on_step("adding what has room")
        self._add()
        best: list[Candidate] = [*self._best]
        if len(self.step.problem.runnable) <= FEW_RUNS and self.orders.is_possible:
            for tried in self._best[:: max(1, len(best) // _ORDERED)]:
                on_step("searching orders")
                other = self.reordered(tried, tried.peak_bytes)
                best += [other] if other else []
        return pareto(best, by_peak)

    @property
    def _best(self) -> list[Candidate]:
        """The candidates evaluated so far that are Pareto-optimal by (peak, cost), lowest peak first."""
        return pareto(self._seen.values(), by_peak)

    def _peaks(self, count: int) -> list[int]:
        """Return ``count`` evenly spaced peaks in bytes over the range of `_best`, lowest first."""
        best = self._best
        low, high = best[0].peak_bytes, best[-1].peak_bytes
        return [low + (high - low) * k // count for k in range(count)]

    def _follow(self, peaks: list[int]) -> None:
        """Evaluate minimum cuts under prices (Lagrange multipliers) per program point, adjusted to each peak in turn.

        The prices for a peak start from the last prices for the next higher peak.

        Args:
            peaks: the peaks in bytes, lowest first; the highest is taken first.
        """
        prices: dict[int, float] = {}
        for peak_bytes in reversed(peaks):
            for _ in range(_CUTS):
                found = self.tried(self._cut(prices))
                cheapest = self.seen_within(peak_bytes)
                assert cheapest is not None, "`_peaks` begins with the peak of a candidate"
                most = max(1, cheapest.cost)
                moved = self._moved(prices, found, Limits(peak_bytes, None), most)
                if moved is None:
                    break
                prices = moved

    def _mix(self) -> None:
        """Evaluate mixtures of two neighbouring candidates on the lower hull of (peak, cost).

        A mixture takes one candidate's choices up to a node, and the other candidate's choices after this node.
        """
        best, size = lower_hull(self._best, by_peak), self.problem.size
        part = max(1, (best[-1].peak_bytes - best[0].peak_bytes) // _PARTS)
        for low, high in pairwise(best):
            parts = round((high.peak_bytes - low.peak_bytes) / part)
            differ = sorted({*low.saved} ^ {*high.saved})
            total = sum(size[i] for i in differ)
            for order in (differ, differ[::-1]):
                mixed, done = {*low.saved}, 0
                for i in order:
                    before, done = parts * done // max(1, total), done + size[i]
                    mixed ^= {i}
                    if before < parts * done // max(1, total) < parts:
                        self.tried(mixed)

    def _add(self) -> None:
        """Evaluate decisions that save more values than the cheapest candidate within a peak, for many peaks.

        The peaks are those of the Pareto-optimal candidates, and evenly spaced ones.
        """
        left = len(self._seen) + max(_LEAST, _WORK // max(1, len(self._state.index)))
        targets = {*self._peaks(_PARTS), *(t.peak_bytes for t in self._best[:-1])}
        # Spread, so that the targets reached before the evaluations run out cover the whole range.
        for peak_bytes in _spread(sorted(targets)):
            tried = self.seen_within(peak_bytes)
            assert tried is not None, "`_peaks` begins with the peak of a candidate"
            more = self._room(tried, peak_bytes)
            while more and len(self._seen) < left:
                if self.tried((*tried.saved, *more)).peak_bytes <= peak_bytes:
                    break
                # `_room` checks roughly, so it may propose too much: keep the most valuable quarter.
                more = more[: len(more) // 4]

    def _room(self, tried: Candidate, peak_bytes: int) -> list[int]:
        """Return recomputed values that probably can be saved within a peak, highest cost per byte first.

        Args:
            tried: the candidate that recomputes the values.
            peak_bytes: limit on the peak, in bytes.

        Returns:
            Nodes of the graph problem.
        """
        problem, (begin, first, _) = self.problem, self.uses()
        room = np.full(len(self._state.index) + 1, peak_bytes)
        for moment, nbytes in tried.alive.items():
            if moment >= 0:
                room[moment] -= nbytes
        more = []
        for i in worth_saving(problem, tried.saved):
            there = room[begin[i] : first[i]]
            if problem.size[i] and there.size and there.min() >= problem.size[i]:
                there -= problem.size[i]
                more.append(i)
        return more

    def bound(
        self, bound: Callable[[int, Iterable[int]], int], starts: Iterable[Iterable[int]]
    ) -> tuple[tuple[int, int], ...]:
        """Return a line of cost over peak that falls in steps, and below which no schedule of the step lies.

        The line is constant between two peaks, because a bound that is proven for a peak also holds for all lower
        peaks.

        Args:
            bound: returns a lower bound on the cost within a peak in bytes, from the bytes alive at given
                program points, as `remat.planning.peak_bound.PeakBounds.bound` does.
            starts: decisions, each as its saved nodes of the graph problem. The highest peak of the Pareto-optimal
                ones is the end of the line. Bounds are evaluated at the program points where two of them have most
                bytes alive.

        Returns:
            Vertices (peak bytes, cost) of the line, from the least possible peak upwards.
        """
        best = pareto(map(self.tried, starts), by_peak)
        low, high = self.least_possible, best[-1].peak_bytes
        moments = [m for t in (best[0], best[len(best) // 2]) for m in self.highest(t)]
        peaks = sorted({low + (high - low) * k // _STEPS for k in range(_STEPS + 1)})
        costs = accumulate((bound(p, moments) for p in peaks), min)
        line: dict[int, int] = {}
        for cost, step in groupby(zip(peaks, costs, strict=True), key=itemgetter(1)):
            end = max(peak_bytes for peak_bytes, _ in step)
            line |= {low: cost, end: cost}
            low = end + 1
        return tuple(line.items())


def _spread(items: list[int]) -> list[int]:
    """Return the items in another order: items 0, 8, 16, …, then items 1, 9, 17, …, and so on."""
    return [item for k in range(8) for item in items[k::8]]
