"""The frontier by peak: decisions of which none has a lower peak and costs no more, without a search for each.

Minimum cuts propose: at one price for every byte (the vertices of the hull), and at prices on moments that
follow a falling peak. Between two neighbours lie mixtures: the choices of one up to a node, those of the
other from there on; in a model of equal layers, that is layer by layer. Then what has room below a peak
is kept too, many values at once, and of small steps other orders are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Protocol

import numpy as np

from remat.planning.candidates import Candidate, pareto
from remat.planning.peak_search import Limits, PeakSearch
from remat.solvers.graph_problem import evaluate

#: Peaks that prices follow, and cuts for each.
_PEAKS, _CUTS = 16, 4
#: Peaks evenly over the range: mixtures and additions aim at them.
_PARTS = 24
#: Nodes that the additions may walk over, and evaluations that they have at least.
_WORK, _LEAST = 800_000, 24
#: Runs of a step that is small enough for a search over orders, and points from which it begins.
FEW_RUNS, _ORDERED = 1_000, 8
#: Steps of the line of bounds.
_STEPS = 64


class Bounds(Protocol):
    """What proves lower bounds on the cost within a peak; see `remat.planning.peak_bound.PeakBounds`."""

    def bound(self, peak_bytes: int, moments: Iterable[int]) -> int: ...


def _figures(found: Candidate) -> tuple[int, int]:
    return found.peak_bytes, found.cost


class PeakFrontier(PeakSearch):
    """Searches the decisions of one prepared graph over all peaks at once."""

    def found(
        self, starts: Iterable[Iterable[int]], on_step: Callable[[str], None]
    ) -> list[Candidate]:
        """The frontier, the lowest peak first.

        Args:
            starts: decisions to begin with; at least one.
            on_step: called with a line of text before each step.
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
        return pareto(best, _figures)

    @property
    def _best(self) -> list[Candidate]:
        return pareto(self._seen.values(), _figures)

    def _peaks(self, count: int) -> list[int]:
        """Peaks evenly over the range that is reached, the lowest first."""
        best = self._best
        low, high = best[0].peak_bytes, best[-1].peak_bytes
        return [low + (high - low) * k // count for k in range(count)]

    def _cheapest(self, peak_bytes: int) -> Candidate:
        """The cheapest of all that were tried within a peak, which one of them is."""
        return min(
            (t for t in self._seen.values() if t.peak_bytes <= peak_bytes),
            key=lambda t: (t.cost, t.peak_bytes),
        )

    def _follow(self, peaks: list[int]) -> None:
        """Cuts at prices on moments: those of one peak are where those of the next lower one begin."""
        prices: dict[int, float] = {}
        for peak_bytes in reversed(peaks):
            for _ in range(_CUTS):
                found = self.tried(self._cut(prices))
                most = max(1, self._cheapest(peak_bytes).cost)
                moved = self._moved(prices, found, Limits(peak_bytes, None), most)
                if moved is None:
                    break
                prices = moved

    def _mix(self) -> None:
        """Fills wide gaps: the choices of one corner up to a node, those of the next one from there on."""
        best, size = _corners(self._best), self.problem.size
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
        """Keeps more, up to the peaks that were reached and to others between them."""
        left = len(self._seen) + max(_LEAST, _WORK // max(1, len(self._state.index)))
        targets = {*self._peaks(_PARTS), *(t.peak_bytes for t in self._best[:-1])}
        for peak_bytes in _spread(sorted(targets)):
            tried = self._cheapest(peak_bytes)
            more = self._room(tried, peak_bytes)
            while more and len(self._seen) < left:
                if self.tried((*tried.saved, *more)).peak_bytes <= peak_bytes:
                    break
                more = more[: len(more) // 4]

    def _room(self, tried: Candidate, peak_bytes: int) -> list[int]:
        """What is computed twice and may well be kept below a peak, the dearest per byte first."""
        problem, (begin, first, _) = self.problem, self.uses
        room = np.full(len(self._state.index) + 1, peak_bytes)
        for moment, nbytes in tried.alive.items():
            if moment >= 0:
                room[moment] -= nbytes
        saved, more = {*tried.saved}, []
        again = [
            i
            for i in evaluate(problem, tried.saved).recomputed
            if problem.savable[i] and problem.cost[i] and problem.in_forward[i] and i not in saved
        ]
        for i in sorted(again, key=lambda i: (-problem.cost[i] / (1 + problem.size[i]), i)):
            there = room[begin[i] : first[i]]
            if problem.size[i] and there.size and there.min() >= problem.size[i]:
                there -= problem.size[i]
                more.append(i)
        return more

    def bound(self, bounds: Bounds, starts: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
        """Vertices (peak bytes, cost) of a falling line below which no schedule of the step lies.

        It falls in steps: what is proven of a peak holds for all lower ones. It goes from the least peak that
        is possible to the highest of some decisions, which also say at which moments to look.
        """
        best = pareto(map(self.tried, starts), _figures)
        low, high = self.least_possible, best[-1].peak_bytes
        moments = [m for t in (best[0], best[len(best) // 2]) for m in self.highest(t)]
        peaks = sorted({low + (high - low) * k // _STEPS for k in range(_STEPS + 1)})
        costs = accumulate((bounds.bound(p, moments) for p in peaks), min)
        line: dict[int, int] = {}
        for cost, step in groupby(zip(peaks, costs, strict=True), key=itemgetter(1)):
            end = max(peak_bytes for peak_bytes, _ in step)
            line |= {low: cost, end: cost}
            low = end + 1
        return tuple(line.items())


def _corners(best: list[Candidate]) -> list[Candidate]:
    """Those on the lower hull of (peak, cost)."""
    found: list[Candidate] = []
    for c in best:
        while len(found) > 1:
            a, b = found[-2:]
            if (b.cost - a.cost) * (c.peak_bytes - a.peak_bytes) < (c.cost - a.cost) * (
                b.peak_bytes - a.peak_bytes
            ):
                break
            found.pop()
        found.append(c)
    return found


def _spread(items: list[int]) -> list[int]:
    """The same in another order: every eighth, then those after them, and so on."""
    return [item for k in range(8) for item in items[k::8]]
