"""What to save and in which way, within a peak: prices on moments and on the link, then local moves.

With a price on every byte at every moment and on every copy's time, each saved value takes its cheapest
way, and what to save is a minimum cut. The prices follow where a schedule is over the peak, and where the
link is behind. Around what that finds, ways are changed one by one, by what the evaluator says. Problems
with few decisions are searched whole.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.errors import ProblemError
from remat.solvers.flow import Network
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.ways_problem import (
    OFFLOADED,
    Followed,
    WaysEvaluation,
    WaysProblem,
    evaluate_ways,
    follow,
)

#: Cuts that the prices take at most.
_CUTS = 30
#: Prices and costs sum to less than this, so that every flow fits 64-bit integers.
_ROOM = 2**58
#: Runs that all evaluations together may walk over, and evaluations that there are at least.
_WORK, _LEAST = 1_500_000, 250
#: Decisions together with ways up to which all are looked at.
WHOLE = 4_096
#: Changes that are tried at the highest moment.
_MENDS = 12
#: Decisions from which one way at a time is changed.
_IMPROVED = 2
#: Windows of the link that have a price, in each direction.
_WINDOWS = 12

#: A schedule: its runs, the moment of each, and its boundary.
Scheduled = tuple[Sequence[int], Sequence[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """When the values of the graph problem are there, by moments; one entry for each.

    Attributes:
        begin: where it is made.
        ready: its last use in forward.
        first: its first use in backward.
        last: its last use there.
    """

    begin: Sequence[int]
    ready: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A decision with ways, and what it comes to.

    Attributes:
        saved: positions in the graph problem.
        ways: the ways of values that are not just kept, by nodes of the step problem.
        cost: what runs again, packing, and waiting.
        peak_bytes: of the device.
        over: bytes above the capacity, of all moments together.
    """

    saved: tuple[int, ...]
    ways: dict[int, int]
    cost: int
    peak_bytes: int
    over: int
    followed: Followed
    done: WaysEvaluation

    @property
    def rank(self) -> tuple[int, int]:
        """What is least for the best: what fits comes before what does not."""
        return self.over, self.cost


class WaysSearch:
    """Searches decisions with ways, within one peak.

    Args:
        problem: the problem with ways.
        graph: what may be saved and what recomputed; costs are those of the step.
        node_of: for each node of the graph problem, the node of the step whose value it is; -1 without.
        schedule: makes a schedule of what is saved.
        lives: when values are there.
        capacity: the peak.
    """

    def __init__(
        self,
        problem: WaysProblem,
        graph: GraphProblem,
        node_of: Sequence[int],
        schedule: Callable[[Iterable[int]], Scheduled],
        lives: Lives,
        capacity: int,
    ) -> None:
        self._problem, self._graph, self._node_of = problem, graph, node_of
        self.schedule, self._lives, self._capacity = schedule, lives, capacity
        self._followed: dict[tuple[int, ...], tuple[Followed, Sequence[int]]] = {}
        self._walked = self._evaluations = 0

    # ---- what a decision comes to ---------------------------------------------------------------------
    @cached_property
    def _always(self) -> tuple[int, ...]:
        """What can only be saved, or costs nothing to save."""
        p = self._graph
        return tuple(
            i for i in range(len(p)) if p.savable[i] and (not p.recomputable[i] or not p.size[i])
        )

    def found(self, saved: Iterable[int], ways: Mapping[int, int]) -> Found:
        """What a decision comes to.

        Raises:
            ProblemError: backward is left with something that is neither saved nor recomputable.
        """
        kept = evaluate(self._graph, {*saved, *self._always}).saved
        known = self._followed.get(kept)
        if known is None:
            sequence, moments, boundary = self.schedule(kept)
            known = follow(self._problem, sequence, boundary), moments
            self._followed[kept] = known
            self._walked += 3 * len(sequence)
        return self.evaluated(kept, known[0], ways)

    def evaluated(
        self, saved: tuple[int, ...], followed: Followed, ways: Mapping[int, int]
    ) -> Found:
        """What a schedule with ways comes to."""
        used = {v: way for v, way in sorted(ways.items()) if v in followed.idle}
        done = evaluate_ways(self._problem, followed, used, self._capacity)
        self._walked += len(followed.sequence)
        self._evaluations += 1
        return Found(
            saved=saved,
            ways=used,
            cost=done.cost,
            peak_bytes=done.peak_bytes,
            over=sum(b - self._capacity for b in done.placement.bytes_alive if b > self._capacity),
            followed=followed,
            done=done,
        )

    def _spent(self) -> bool:
        return self._walked > _WORK and self._evaluations > _LEAST

    # ---- the search -----------------------------------------------------------------------------------
    def best(self, starts: Iterable[Iterable[int]]) -> Found:
        """The cheapest decision found within the peak; where none is, the one over by the fewest bytes.

        Args:
            starts: decisions on what to save; at least one.
        """
        if self._choices() <= WHOLE:
            return self.whole()
        begun = [self.found(saved, {}) for saved in starts]
        begun += [self.greedy(f) for f in begun]
        best = min(begun, key=lambda f: f.rank)
        begun.append(self._by_prices(best))
        begun.sort(key=lambda f: f.rank)
        return min((self.improved(f) for f in begun[:_IMPROVED]), key=lambda f: f.rank)

    def _choices(self) -> int:
        """How many decisions with ways there are, or a number above `WHOLE`."""
        count, p = 1, self._graph
        for i in range(len(p)):
            if p.savable[i] and p.size[i]:
                node = self._node_of[i]
                ways = len(self._problem.ways_of(node)) if node >= 0 else 0
                count *= 1 + ways + bool(p.recomputable[i])
                if count > WHOLE:
                    break
        return count

    def whole(self) -> Found:
        """The best of all decisions and ways."""
        p = self._graph
        free = [i for i in range(len(p)) if p.savable[i] and p.recomputable[i] and p.size[i]]
        best: Found | None = None
        seen: set[tuple[int, ...]] = set()
        for bits in itertools.product((True, False), repeat=len(free)):
            chosen = [i for i, bit in zip(free, bits, strict=True) if bit]
            try:
                start = self.found(chosen, {})
            except ProblemError:
                continue
            if start.saved in seen or (best and not best.over and start.cost >= best.cost):
                continue  # what more it needs is not free
            seen.add(start.saved)
            nodes = [v for v in start.followed.idle if self._problem.ways_of(v)]
            for ways in itertools.product(*((None, *self._problem.ways_of(v)) for v in nodes)):
                given = {v: w for v, w in zip(nodes, ways, strict=True) if w is not None}
                one = self.evaluated(start.saved, start.followed, given) if given else start
                if best is None or one.rank < best.rank:
                    best = one
        if best is None:
            raise ProblemError("no decision leaves backward with all that it reads")
        return best

    def greedy(self, start: Found) -> Found:
        """Ways for what a decision keeps, the most bytes per second first, until it fits."""
        rates = []
        for v in start.followed.idle:
            for way in self._problem.ways_of(v):
                gained, paid = self._gain(v, way)
                if gained > 0:
                    rates.append((-gained / (1 + paid), v, way))
        ways: dict[int, int] = {}
        order = [(v, way) for _, v, way in sorted(rates)]
        count = len(order)
        low, high = 0, count  # the shortest part of the list that fits, or all of it
        best = start
        while low < high:
            middle = (low + high) // 2
            ways = {}
            for v, way in order[:middle]:
                ways.setdefault(v, way)
            tried = self.evaluated(start.saved, start.followed, ways)
            if tried.rank < best.rank or (best.over and not tried.over):
                best = tried
            if tried.over:
                low = middle + 1
            else:
                high = middle
        ways = {}
        for v, way in order[:high]:
            ways.setdefault(v, way)
        return min(best, self.evaluated(start.saved, start.followed, ways), key=lambda f: f.rank)

    def _gain(self, v: int, way: int) -> tuple[int, int]:
        """Bytes that a way frees, and the time it takes of whoever does it."""
        if way == OFFLOADED:
            return self._problem.step.size[v], self._problem.send[v] + self._problem.fetch[v]
        packing = self._problem.packings[v][way]
        return self._problem.step.size[v] - packing.nbytes, packing.pack + packing.unpack

    # ---- prices ---------------------------------------------------------------------------------------
    def _by_prices(self, start: Found) -> Found:
        """The best of what prices on moments and on the link come to."""
        prices, best = _Prices(self), start
        most = max(1, 2 * start.cost)
        step, idle = 1.0, 0
        for _ in range(_CUTS):
            saved, ways = prices.decision()
            found = self.found(saved, ways)
            if found.rank < best.rank:
                best, idle = found, 0
                most = max(1, best.cost if not best.over else most)
            else:
                idle += 1
                if idle % 4 == 0:
                    step /= 2
            if not prices.move(found, self._moments(found), most, step) or self._spent():
                break
        return best

    def _moments(self, found: Found) -> Sequence[int]:
        return self._followed[found.saved][1]

    # ---- local moves ----------------------------------------------------------------------------------
    def improved(self, best: Found) -> Found:
        """Changes one way at a time while that is better: what costs most first."""
        while not self._spent():
            before = best
            for change in (self._mended, self._dropped, self._saved_more):
                best = change(best)
            if best.rank >= before.rank:
                break
        return best

    def _mended(self, best: Found) -> Found:
        """Ways for values that are carried over the highest moment, while it is too high."""
        while best.over and not self._spent():
            at = best.done.bytes_alive.index(max(best.done.bytes_alive))
            tried = []
            for v, (ready, needed) in best.followed.idle.items():
                if ready < at < needed:
                    for way in self._problem.ways_of(v):
                        if best.ways.get(v) != way:
                            gained, paid = self._gain(v, way)
                            tried.append((min(gained, best.over) / (1 + paid), v, way))
            tried.sort(key=lambda t: (-t[0], t[1], t[2]))
            for _, v, way in tried[:_MENDS]:
                found = self.evaluated(best.saved, best.followed, {**best.ways, v: way})
                if found.rank < best.rank:
                    best = found
                    break
            else:
                found = self._given_up(best, self._of_nodes(best.followed.idle)[:_MENDS])
                if found is best:
                    break
                best = found
        return best

    def _of_nodes(self, nodes: Iterable[int]) -> list[int]:
        """The graph problem's nodes of values that may be made again, the cheapest per byte first."""
        p, wanted = self._graph, set(nodes)
        found = [
            i
            for i, v in enumerate(self._node_of)
            if v in wanted and p.recomputable[i] and p.size[i]
        ]
        return sorted(found, key=lambda i: (p.cost[i] / p.size[i], i))

    def _given_up(self, best: Found, nodes: Sequence[int]) -> Found:
        """The first decision without one of some saved values that is better."""
        for i in nodes:
            if self._spent():
                break
            try:
                found = self.found([k for k in best.saved if k != i], best.ways)
            except ProblemError:  # what one needs that was given up cannot be made again
                continue
            if found.rank < best.rank:
                return found
        return best

    def _dropped(self, best: Found) -> Found:
        """Keeps values as they are, or another way, where that costs less."""
        order = sorted(best.ways, key=lambda v: (-self._gain(v, best.ways[v])[1], v))
        for v in order:
            if self._spent():
                break
            for way in (None, *self._problem.ways_of(v)):
                if way == best.ways.get(v):
                    continue
                ways = {u: w for u, w in best.ways.items() if u != v}
                found = self.evaluated(
                    best.saved, best.followed, ways if way is None else {**ways, v: way}
                )
                if found.rank < best.rank:
                    best = found
        return best

    def _saved_more(self, best: Found) -> Found:
        """Saves what is made again, in any way; and makes again what is saved in a way that costs."""
        p, node_of = self._graph, self._node_of
        again = [
            i
            for i in evaluate(p, best.saved).recomputed
            if p.savable[i] and p.cost[i] and p.in_forward[i] and node_of[i] >= 0
        ]
        again.sort(key=lambda i: (-p.cost[i] / (1 + p.size[i]), i))
        for i in again:
            if i in best.saved:
                continue
            for way in (None, *self._problem.ways_of(node_of[i])):
                if self._spent():
                    return best
                ways = best.ways if way is None else {**best.ways, node_of[i]: way}
                found = self.found((*best.saved, i), ways)
                if found.over and found.cost < best.cost:
                    found = self._mended(found)
                if found.rank < best.rank:
                    best = found
                    break
        while not self._spent():
            found = self._given_up(best, self._of_nodes(best.ways))
            if found is best:
                break
            best = found
        return best


class _Prices:
    """Prices on bytes at moments and on the link's time in windows, and the decision best at them."""

    def __init__(self, search: WaysSearch) -> None:
        self._of = search
        problem, graph = search._problem, search._graph
        self._network = Network(graph)
        self._moment: dict[int, float] = {}
        self._window: dict[tuple[bool, int, int], float] = {}
        lives = search._lives
        whole = search.found([i for i in range(len(graph)) if graph.savable[i]], {})
        moments = search._moments(whole)
        edge = whole.followed.done.boundary
        # Time at the start of each run, to know when what is sent at once has left.
        self._starts = [0, *itertools.accumulate(problem.times[v] for v in whole.followed.sequence)]
        runs = whole.followed.sequence
        self._moments, self._edge = list(moments), edge
        self._time_scale = max(1, self._starts[-1] // 2)
        self._byte_scale = max(1, max(whole.done.bytes_alive) - search._capacity)
        at_run = {m: k for k, m in reversed([*enumerate(moments)])}
        n = len(graph)
        self._sent, self._fetched = list(lives.ready), list(lives.first)
        for i in range(n):
            v = search._node_of[i]
            if v < 0 or problem.send[v] < 0:
                continue
            r, f = at_run.get(lives.ready[i]), at_run.get(lives.first[i])
            if r is None or f is None or not r < edge <= f:
                continue
            end = self._starts[r + 1] + problem.send[v]
            k = min(edge, bisect_left(self._starts, end)) - 1
            self._sent[i] = max(lives.ready[i], moments[max(0, min(k, len(runs) - 1))])
            start = self._starts[f] - problem.fetch[v]
            k = max(edge, bisect_right(self._starts, start) - 1)
            self._fetched[i] = min(lives.first[i], moments[min(k, len(runs) - 1)])

    def decision(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """What is best to save at the prices, and each value's cheapest way."""
        search, graph = self._of, self._of._graph
        problem, lives = search._problem, search._lives
        at = sorted(self._moment)
        sums = [0.0, *itertools.accumulate(self._moment[m] for m in at)]

        def priced(low: int, high: int) -> float:
            return max(0.0, sums[bisect_left(at, high + 1)] - sums[bisect_left(at, low)])

        keep, again, way_of = [], [], {}
        for i, nbytes in enumerate(graph.size):
            begin, ready, first, last = (
                lives.begin[i], lives.ready[i], lives.first[i], lives.last[i],
            )  # fmt: skip
            least = nbytes * priced(begin, last) if nbytes and at else 0.0
            v = search._node_of[i]
            if nbytes and at and v >= 0 and first <= last and ready < first:
                ends = nbytes * (priced(begin, ready) + priced(first, last))
                for k, packing in enumerate(problem.packings[v]):
                    price = ends + packing.nbytes * priced(ready + 1, first - 1)
                    price += packing.pack + packing.unpack
                    if price < least:
                        least, way_of[i] = price, k
                if problem.send[v] >= 0:
                    held = priced(begin, self._sent[i]) + priced(self._fetched[i], last)
                    price = nbytes * held + self._on_link(i, v)
                    if price < least:
                        least, way_of[i] = price, OFFLOADED
            keep.append(least)
            held = nbytes * priced(first, last) if nbytes and at else 0.0
            again.append((graph.cost[i] if graph.in_forward[i] else 0) + held)
        scale = min(2.0**20, _ROOM / max(1.0, sum(keep) + sum(again)))
        saved = self._network.cut(
            [int(x * scale) for x in keep], [int(x * scale) for x in again]
        ).saved
        ways = {search._node_of[i]: way for i in saved if (way := way_of.get(i)) is not None}
        return saved, ways

    def _on_link(self, i: int, v: int) -> float:
        lives, problem, total = self._of._lives, self._of._problem, 0.0
        for (back, low, high), price in self._window.items():
            if low <= (lives.first[i] if back else lives.ready[i]) <= high:
                total += price * (problem.fetch[v] if back else problem.send[v])
        return total

    def move(self, found: Found, moments: Sequence[int], most: float, step: float) -> bool:
        """Moves the prices along what a decision is over, by Polyak's rule; False where it is within all."""
        capacity, bytes_scale, time_scale = self._of._capacity, self._byte_scale, self._time_scale
        highest: dict[int, int] = {}
        # As if nothing waited: waiting is what the link's prices are about.
        for m, nbytes in zip(moments, found.done.bytes_alive, strict=True):
            if nbytes > highest.get(m, 0):
                highest[m] = nbytes
        slope: dict[int, float] = {
            m: (nbytes - capacity) / bytes_scale
            for m, nbytes in highest.items()
            if nbytes > capacity or m in self._moment
        }
        self._open_windows(found, moments)
        behind = {w: self._behind(w, found, moments) / time_scale for w in self._window}
        length = sum(s * s for s in slope.values()) + sum(s * s for s in behind.values())
        if not length:
            return False
        value = float(found.cost - found.done.waited)
        value += sum(self._moment.get(m, 0.0) * s * bytes_scale for m, s in slope.items())
        value += sum(self._window[w] * s * time_scale for w, s in behind.items())
        move = step * max(most - value, 0.02 * most) / length
        moved = {m: self._moment.get(m, 0.0) + move * s / bytes_scale for m, s in slope.items()}
        self._moment = {m: p for m, p in moved.items() if p > 0}
        for w, s in behind.items():
            self._window[w] = min(1.0, max(0.0, self._window[w] + move * s / time_scale))
        return True

    def _open_windows(self, found: Found, moments: Sequence[int]) -> None:
        """Begins a price for each stretch in which the link was behind, the longest waits first."""
        placed, last = found.done.placement, len(moments) - 1
        scale = len(moments) / max(1, len(found.done.placement.bytes_alive))
        for back, waits in ((False, placed.sending), (True, placed.fetching)):
            opened = sum(w[0] == back for w in self._window)
            for wait in sorted(waits, key=lambda w: -w.time)[: max(0, _WINDOWS - opened)]:
                low, high = sorted(
                    moments[max(0, min(last, int(k * scale)))] for k in (wait.begin, wait.at)
                )
                self._window.setdefault((back, low, high), 0.0)

    def _behind(self, window: tuple[bool, int, int], found: Found, moments: Sequence[int]) -> float:
        """Time by which copies of a window take longer than the runs beside them."""
        back, low, high = window
        problem, idle = self._of._problem, found.followed.idle
        copies = 0
        for v in found.done.offloaded:
            at = moments[idle[v][1 if back else 0]]
            if low <= at <= high:
                copies += problem.fetch[v] if back else problem.send[v]
        runs = sum(
            problem.times[v]
            for v, m in zip(found.followed.sequence, moments, strict=True)
            if low <= m <= high
        )
        return copies - runs
