"""Choose values to save and to offload within a peak, by Lagrange multipliers per program point and on the link, then local moves.

With a price on every byte at every moment and on every copy's time, each saved value stays or is offloaded,
whichever is cheaper, and what to save is a minimum cut. The prices follow where a schedule is over the peak,
and where the link is behind. Around what that finds, single decisions are changed, by what the evaluator says.
Problems with few decisions are searched whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from remat.errors import ProblemError
from remat.solvers.copies import Copy
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.offload_prices import Lives, OffloadChoice, Prices
from remat.solvers.offload_problem import (
    CarriedSchedule,
    OffloadProblem,
    carried,
    evaluate_offloads,
)

#: Cuts that the prices take at most.
_CUTS = 30
#: Runs that all evaluations together may walk over, and evaluations that there are at least.
_WORK, _LEAST = 1_500_000, 250
#: Share of that work which may be spent on one further schedule.
_AROUND = 0.2
#: Decisions on saving and offloading up to which all are evaluated.
WHOLE = 4_096
#: Changes that are tried at the highest moment.
_MENDS = 12
#: Bytes per second that differ by less than 2 to the power of one over this count as the same.
_ALIKE = 8
#: Decisions from which one value at a time is changed.
_IMPROVED = 2

#: A schedule: its runs, the moment of each, and its boundary.
Scheduled = tuple[Sequence[int], Sequence[int], int]


class OffloadSearch:
    """Searches decisions with offloads, within one peak.

    Args:
        problem: the problem.
        graph: what may be saved and what recomputed; costs are those of the step.
        node_of: for each node of the graph problem, the node of the step whose value it is; -1 without.
        schedule: makes a schedule of what is saved.
        lives: when values are there.
        capacity: the peak.
    """

    def __init__(
        self,
        problem: OffloadProblem,
        graph: GraphProblem,
        node_of: Sequence[int],
        schedule: Callable[[Iterable[int]], Scheduled],
        lives: Lives,
        capacity: int,
    ) -> None:
        self._problem, self._graph, self._node_of = problem, graph, node_of
        self.schedule, self._lives, self._capacity = schedule, lives, capacity
        self._schedules: dict[tuple[int, ...], tuple[CarriedSchedule, Sequence[int]]] = {}
        self._walked = self._evaluations = 0
        self._grant(1.0)

    # ---- evaluation -----------------------------------------------------------------------------------
    @cached_property
    def _always(self) -> tuple[int, ...]:
        """Values that can only be saved, or cost nothing to save."""
        p = self._graph
        return tuple(
            i for i in range(len(p)) if p.savable[i] and (not p.recomputable[i] or not p.size[i])
        )

    def choice(self, saved: Iterable[int], offloaded: Iterable[int]) -> OffloadChoice:
        """A decision with its measures.

        Raises:
            ProblemError: backward is left with something that is neither saved nor recomputable.
        """
        kept = evaluate(self._graph, {*saved, *self._always}).saved
        known = self._schedules.get(kept)
        if known is None:
            sequence, moments, boundary = self.schedule(kept)
            known = carried(self._problem, sequence, boundary), moments
            self._schedules[kept] = known
            self._walked += 3 * len(sequence)
        return self.evaluated(kept, known[0], offloaded)

    def settled(self, choice: OffloadChoice) -> OffloadChoice:
        """The same schedule with further offloads where it is over the peak, and without those that do not pay."""
        self._grant(_AROUND)
        return self._dropped(self._mended(choice, again=False))

    def on(
        self,
        saved: tuple[int, ...],
        sequence: Sequence[int],
        boundary: int,
        offloaded: Iterable[int],
    ) -> OffloadChoice:
        """Another schedule with offloads, and its measures."""
        return self.evaluated(saved, carried(self._problem, sequence, boundary), offloaded)

    def sent(self, saved: tuple[int, ...], sequence: Sequence[int], boundary: int) -> OffloadChoice:
        """Another schedule, with values offloaded until it fits: those that nobody waits for, the earliest first."""
        self._grant(_AROUND)
        best = self.on(saved, sequence, boundary, ())
        idle = best.schedule.idle
        for v in sorted(idle, key=lambda v: (idle[v][0], v)):
            if not best.over or self._spent():
                break
            if self.may_offload(v):
                choice = self.evaluated(saved, best.schedule, (*best.offloaded, v))
                if choice.over < best.over and choice.exposed <= best.exposed:
                    best = choice
        return self._dropped(self._mended(best, again=False))

    def evaluated(
        self, saved: tuple[int, ...], schedule: CarriedSchedule, offloaded: Iterable[int]
    ) -> OffloadChoice:
        """A schedule with offloads, and its measures."""
        evaluation = evaluate_offloads(self._problem, schedule, offloaded, self._capacity)
        self._walked += len(schedule.sequence)
        self._evaluations += 1
        alive = evaluation.placement.bytes_alive
        return OffloadChoice(
            saved=saved,
            over=sum(b - self._capacity for b in alive if b > self._capacity),
            schedule=schedule,
            evaluation=evaluation,
        )

    def copies(self, choice: OffloadChoice, *, at_once: bool) -> list[Copy]:
        """The offloaded values, and when each is away: with the time of copies, or as if they took none."""
        offloaded, placement = choice.offloaded, choice.evaluation.placement
        places = [*zip(placement.freed, placement.fetched, strict=True)]
        if at_once:
            places = [choice.schedule.idle[v] for v in offloaded]
        return [
            Copy(value=v, nbytes=self._problem.step.size[v], sent=sent, fetched=fetched)
            for v, (sent, fetched) in zip(offloaded, places, strict=True)
        ]

    def may_offload(self, v: int) -> bool:
        """Whether the value of a node of the step may be offloaded."""
        return self._problem.send[v] >= 0

    def _grant(self, share: float) -> None:
        """Begins a search that may take a share of the usual work."""
        self._work = self._walked + int(share * _WORK)
        self._least = self._evaluations + int(share * _LEAST)

    def _spent(self) -> bool:
        return self._walked > self._work and self._evaluations > self._least

    # ---- the search -----------------------------------------------------------------------------------
    def best(self, starts: Iterable[Iterable[int]]) -> OffloadChoice:
        """The cheapest decision found within the peak; if none, the one with the fewest bytes above it.

        Args:
            starts: decisions on what to save; at least one.
        """
        if self._count() <= WHOLE:
            return self.whole()
        self._grant(1.0)
        begun = [self.choice(saved, ()) for saved in starts]
        begun += [self.greedy(c) for c in begun]
        best = min(begun, key=lambda c: c.rank)
        begun.append(self._by_prices(best))
        begun.sort(key=lambda c: c.rank)
        return min((self.improved(c) for c in begun[:_IMPROVED]), key=lambda c: c.rank)

    def _count(self) -> int:
        """How many decisions there are, or a number above `WHOLE`."""
        count, p = 1, self._graph
        for i in range(len(p)):
            if p.savable[i] and p.size[i]:
                node = self._node_of[i]
                count *= 1 + (node >= 0 and self.may_offload(node)) + bool(p.recomputable[i])
                if count > WHOLE:
                    break
        return count

    def whole(self) -> OffloadChoice:
        """The best of all decisions."""
        p = self._graph
        free = [i for i in range(len(p)) if p.savable[i] and p.recomputable[i] and p.size[i]]
        best: OffloadChoice | None = None
        seen: set[tuple[int, ...]] = set()
        for bits in itertools.product((True, False), repeat=len(free)):
            chosen = [i for i, bit in zip(free, bits, strict=True) if bit]
            try:
                start = self.choice(chosen, ())
            except ProblemError:
                continue
            if start.saved in seen or (best and not best.over and start.cost >= best.cost):
                continue  # what more it needs is not free
            seen.add(start.saved)
            nodes = [v for v in start.schedule.idle if self.may_offload(v)]
            for away in itertools.product((False, True), repeat=len(nodes)):
                offloaded = list(itertools.compress(nodes, away))
                one = self.evaluated(start.saved, start.schedule, offloaded) if offloaded else start
                if best is None or one.rank < best.rank:
                    best = one
        if best is None:
            raise ProblemError("no decision leaves backward with all that it reads")
        return best

    def greedy(self, start: OffloadChoice) -> OffloadChoice:
        """Offloads of what a decision keeps until it fits: the most bytes per second first, then what is ready first."""
        problem, rates = self._problem, []
        for v, (ready, _) in start.schedule.idle.items():
            if self.may_offload(v):
                time = problem.send[v] + problem.fetch[v]
                rate = math.floor(_ALIKE * math.log2(problem.step.size[v] / (1 + time)))
                rates.append((-rate, ready, v))
        order = [v for *_, v in sorted(rates)]
        low, high = 0, len(order)  # the shortest part of the list that fits, or all of it
        best = start
        while low < high:
            middle = (low + high) // 2
            choice = self.evaluated(start.saved, start.schedule, order[:middle])
            if choice.rank < best.rank or (best.over and not choice.over):
                best = choice
            if choice.over:
                low = middle + 1
            else:
                high = middle
        last = self.evaluated(start.saved, start.schedule, order[:high])
        return min(best, last, key=lambda c: c.rank)

    # ---- prices ---------------------------------------------------------------------------------------
    def _by_prices(self, start: OffloadChoice) -> OffloadChoice:
        """The best decision that prices on moments and on the link lead to."""
        p = self._graph
        whole = self.choice([i for i in range(len(p)) if p.savable[i]], ())
        prices, best = (
            Prices(
                self._problem, p, self._node_of, self._lives, self._capacity,
                whole.schedule, self._moments(whole),
            ),
            start,
        )  # fmt: skip
        most = max(1, 2 * start.cost)
        step, idle = 1.0, 0
        for _ in range(_CUTS):
            choice = self.choice(*prices.decision())
            if choice.rank < best.rank:
                best, idle = choice, 0
                most = max(1, best.cost if not best.over else most)
            else:
                idle += 1
                if idle % 4 == 0:
                    step /= 2
            if not prices.move(choice, self._moments(choice), most, step) or self._spent():
                break
        return best

    def _moments(self, choice: OffloadChoice) -> Sequence[int]:
        return self._schedules[choice.saved][1]

    # ---- local moves ----------------------------------------------------------------------------------
    def improved(self, best: OffloadChoice) -> OffloadChoice:
        """Change one value at a time while it improves the decision, the most expensive first."""
        while not self._spent():
            before = best
            for change in (self._mended, self._dropped, self._saved_more):
                best = change(best)
            if best.rank >= before.rank:
                break
        return best

    def _mended(self, best: OffloadChoice, *, again: bool = True) -> OffloadChoice:
        """Offloads values that are carried over the highest moment, while it is too high."""
        sizes, send, fetch = self._problem.step.size, self._problem.send, self._problem.fetch
        while best.over and not self._spent():
            alive, over = best.evaluation.placement.bytes_alive, best.over
            at = alive.index(max(alive))
            candidates = [
                v
                for v, (ready, needed) in best.schedule.idle.items()
                if ready < at < needed and self.may_offload(v) and v not in best.offloaded
            ]
            candidates.sort(key=lambda v: (-min(sizes[v], over) / (1 + send[v] + fetch[v]), v))
            for v in candidates[:_MENDS]:
                choice = self.evaluated(best.saved, best.schedule, (*best.offloaded, v))
                if choice.rank < best.rank:
                    best = choice
                    break
            else:
                nodes = self._of_nodes(best.schedule.idle)[:_MENDS] if again else []
                choice = self._given_up(best, nodes)
                if choice is best:
                    break
                best = choice
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

    def _given_up(self, best: OffloadChoice, nodes: Sequence[int]) -> OffloadChoice:
        """The first decision without one of some saved values that is better."""
        for i in nodes:
            if self._spent():
                break
            try:
                choice = self.choice([k for k in best.saved if k != i], best.offloaded)
            except ProblemError:  # what one needs that was given up cannot be made again
                continue
            if choice.rank < best.rank:
                return choice
        return best

    def _dropped(self, best: OffloadChoice) -> OffloadChoice:
        """Keeps values on the device where that costs less."""
        send, fetch = self._problem.send, self._problem.fetch
        for v in sorted(best.offloaded, key=lambda v: (-(send[v] + fetch[v]), v)):
            if self._spent():
                break
            offloaded = [u for u in best.offloaded if u != v]
            choice = self.evaluated(best.saved, best.schedule, offloaded)
            if choice.rank < best.rank:
                best = choice
        return best

    def _saved_more(self, best: OffloadChoice) -> OffloadChoice:
        """Saves what is recomputed, on the device or offloaded; and recomputes what is offloaded."""
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
            for more in ((), (node_of[i],)) if self.may_offload(node_of[i]) else ((),):
                if self._spent():
                    return best
                choice = self.choice((*best.saved, i), (*best.offloaded, *more))
                if choice.over and choice.cost < best.cost:
                    choice = self._mended(choice)
                if choice.rank < best.rank:
                    best = choice
                    break
        while not self._spent():
            choice = self._given_up(best, self._of_nodes(best.offloaded))
            if choice is best:
                break
            best = choice
        return best
