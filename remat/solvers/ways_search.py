"""What to save and in which way, within a peak: prices on moments and on the link, then local moves.

With a price on every byte at every moment and on every copy's time, each saved value takes its cheapest
way, and what to save is a minimum cut. The prices follow where a schedule is over the peak, and where the
link is behind. Around what that finds, ways are changed one by one, by what the evaluator says. Problems
with few decisions are searched whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from remat.errors import ProblemError
from remat.solvers.copies import Copy
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.ways_lagrangian import Found, Lives, Prices
from remat.solvers.ways_problem import (
    OFFLOADED,
    Followed,
    WaysProblem,
    evaluate_ways,
    follow,
)

#: Cuts that the prices take at most.
_CUTS = 30
#: Runs that all evaluations together may walk over, and evaluations that there are at least.
_WORK, _LEAST = 1_500_000, 250
#: Share of that work which may be spent on one further schedule.
_AROUND = 0.2
#: Decisions together with ways up to which all are looked at.
WHOLE = 4_096
#: Changes that are tried at the highest moment.
_MENDS = 12
#: Bytes per second that differ by less than 2 to the power of one over this count as the same.
_ALIKE = 8
#: Decisions from which one way at a time is changed.
_IMPROVED = 2

#: A schedule: its runs, the moment of each, and its boundary.
Scheduled = tuple[Sequence[int], Sequence[int], int]


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
        self._grant(1.0)

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

    def settled(self, found: Found) -> Found:
        """The same schedule with further ways where it is over the peak, and without those that it does better without."""
        self._grant(_AROUND)
        return self._dropped(self._mended(found, again=False))

    def on(
        self,
        saved: tuple[int, ...],
        sequence: Sequence[int],
        boundary: int,
        ways: Mapping[int, int],
    ) -> Found:
        """What another schedule comes to with ways."""
        return self.evaluated(saved, follow(self._problem, sequence, boundary), ways)

    def sent(self, saved: tuple[int, ...], sequence: Sequence[int], boundary: int) -> Found:
        """Another schedule, with values offloaded until it fits: those that nobody waits for, the earliest first."""
        self._grant(_AROUND)
        best = self.on(saved, sequence, boundary, {})
        idle = best.followed.idle
        for v in sorted(idle, key=lambda v: (idle[v][0], v)):
            if not best.over or self._spent():
                break
            if self._problem.send[v] >= 0:
                found = self.evaluated(saved, best.followed, {**best.ways, v: OFFLOADED})
                if found.over < best.over and found.done.waited <= best.done.waited:
                    best = found
        return self._dropped(self._mended(best, again=False))

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

    def copies(self, found: Found, *, at_once: bool) -> list[Copy]:
        """What is away of what was found, and when: with the time of copies, or as if they took none."""
        sizes, placement, idle = self._problem.step.size, found.done.placement, found.followed.idle
        places = dict(
            zip(
                found.done.offloaded,
                zip(placement.freed, placement.fetched, strict=True),
                strict=True,
            )
        )
        # Where values are packed, runs of pairs stand between those of the schedule.
        if at_once or len(places) < len(found.ways):
            places = idle
        copies = []
        for v, way in found.ways.items():
            left = 0 if way == OFFLOADED else self._problem.packings[v][way].nbytes
            sent, fetched = places[v]
            copies.append(Copy(value=v, nbytes=sizes[v] - left, sent=sent, fetched=fetched))
        return copies

    def _grant(self, share: float) -> None:
        """Begins a search that may take a share of the usual work."""
        self._work = self._walked + int(share * _WORK)
        self._least = self._evaluations + int(share * _LEAST)

    def _spent(self) -> bool:
        return self._walked > self._work and self._evaluations > self._least

    # ---- the search -----------------------------------------------------------------------------------
    def best(self, starts: Iterable[Iterable[int]]) -> Found:
        """The cheapest decision found within the peak; where none is, the one over by the fewest bytes.

        Args:
            starts: decisions on what to save; at least one.
        """
        if self._choices() <= WHOLE:
            return self.whole()
        self._grant(1.0)
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
        """Ways for what a decision keeps, the most bytes per second first, then what is ready first, until it fits."""
        rates = []
        for v, (ready, _) in start.followed.idle.items():
            for way in self._problem.ways_of(v):
                gained, paid = self._gain(v, way)
                if gained > 0:
                    rate = math.floor(_ALIKE * math.log2(gained / (1 + paid)))
                    rates.append((-rate, ready, v, way))
        ways: dict[int, int] = {}
        order = [(v, way) for *_, v, way in sorted(rates)]
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
        p = self._graph
        whole = self.found([i for i in range(len(p)) if p.savable[i]], {})
        prices, best = (
            Prices(
                self._problem, p, self._node_of, self._lives, self._capacity,
                whole.followed, self._moments(whole),
            ),
            start,
        )  # fmt: skip
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

    def _mended(self, best: Found, *, again: bool = True) -> Found:
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
                nodes = self._of_nodes(best.followed.idle)[:_MENDS] if again else []
                found = self._given_up(best, nodes)
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
