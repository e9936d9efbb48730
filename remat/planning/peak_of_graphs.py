"""One peak over all graphs of a step: while one runs, what the others have saved is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from remat.errors import BudgetError
from remat.graph.liveness_of_graphs import PartitionedGraph, highest_of_graphs
from remat.graph.lowering import Decision
from remat.planning.candidates import Candidate, Choice, combine
from remat.planning.planner import Planner
from remat.units import Budget, bytes_of_share, format_bytes

#: How often choices are made again for a lower peak, as what graphs hand on was counted roughly.
_ROUNDS = 8
#: Decisions with the lowest peaks of their graph that are tried for the graph where the peak is.
_LOW = 6
#: Graphs that are searched within what the others leave, the dearest first.
_SEARCHED = 8


class PeakOfGraphs:
    """Decides the prepared graphs of a step by the peak of the whole step.

    Args:
        planners: one for each graph, in the order in which their forwards run. A graph that runs several
            times has one decision for all of its runs.
    """

    def __init__(self, planners: Sequence[Planner]) -> None:
        self._planners = planners
        self._runs = [p.state.joint.runs for p in planners]
        self._partitioned: dict[tuple[int, Decision], PartitionedGraph] = {}

    def highest(self, decided: Sequence[Candidate]) -> tuple[int, ...]:
        """Most bytes alive while each graph runs."""
        return tuple(map(max, highest_of_graphs([*map(self._split, range(len(decided)), decided)])))

    def within(self, budget: Budget) -> list[Candidate]:
        """The cheapest decisions found whose step stays within a budget on its peak.

        Raises:
            BudgetError: none were; the message names the least peak that was found.
        """
        full = [p.allowed_full for p in self._planners]
        peak_bytes, lowest = budget.peak_bytes, self._lowest
        least = max(self.highest(lowest))
        if peak_bytes is None:
            most = max(self.highest(full))
            least = min(least, most)
            peak_bytes = least + bytes_of_share(budget.peak_share or 0.0, most - least)
        best = self._chosen(peak_bytes)
        known = [*([best] if best else []), self._searched(lowest, least), full]
        fits = [d for d in known if max(self.highest(d)) <= peak_bytes]
        offloads = all(p.request.offload is not None for p in self._planners)
        if not fits and offloads:
            fits = [d for d in (self._lowered_by_offloads(lowest, peak_bytes),) if d]
        if not fits:
            raise BudgetError(
                f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes), and no plans of these "
                f"{len(full)} graphs were found within it: the least peak of any found is "
                f"{format_bytes(least)} ({least} bytes): weights, gradients and what one operator needs at "
                "once do not shrink with the budget. Raise the budget, or make the model or the batch smaller"
            )
        best = self._searched(min(fits, key=self._cost), peak_bytes)
        if not offloads:
            return best
        pairs = zip(self._planners, self._with_offloads(best, peak_bytes), strict=True)
        return [p.offloading.with_tagged(d, p.peak(d)) for p, d in pairs]

    def _split(self, k: int, decided: Candidate) -> PartitionedGraph:
        key = (k, decided.decision)
        if key not in self._partitioned:
            done = self._planners[k].split_of(decided)
            assert done.forward is not None
            assert done.backward is not None
            self._partitioned[key] = PartitionedGraph(
                joint=done.joint, forward=done.forward, backward=done.backward
            )
        return self._partitioned[key]

    @cached_property
    def _options(self) -> list[list[Candidate]]:
        """For each graph, the decisions that may be part of a good choice.

        Graphs that are the same up to their numbers, as equal layers are, are decided once.
        """
        known: dict[tuple[str, tuple[str, ...]], list[Candidate]] = {}
        found = []
        for planner in self._planners:
            names = tuple(n.name for n in planner.state.index.nodes)
            key = (planner.fingerprint, names)
            if key not in known:
                known[key] = list(self._options_of(planner))
            found.append(known[key])
        return found

    @staticmethod
    def _options_of(planner: Planner) -> Iterator[Candidate]:
        most_saved = planner.most_saved
        for decided in planner.frontier_by_peak()[0]:
            if most_saved is None or decided.saved_bytes <= most_saved:
                yield decided
        tried = planner.search.tried
        for decided in (*planner.pareto(), planner.allowed_full, planner.cheapest):
            if most_saved is not None and decided.saved_bytes > most_saved:
                continue
            yield replace(decided, peak_bytes=tried(decided.saved).peak_bytes)

    @cached_property
    def _others(self) -> list[int]:
        """For each graph, the bytes beside its own peak and what earlier runs save: about the same always."""
        full = [p.allowed_full for p in self._planners]
        saved, others = 0, []
        highest = self.highest(full)
        for k, (planner, decided) in enumerate(zip(self._planners, full, strict=True)):
            saved += self._runs[k] * decided.saved_bytes
            others.append(highest[k] - planner.peak(decided) - (saved - decided.saved_bytes))
        return others

    def _choices(self, score: Callable[[int, int, int], int | None]) -> list[Choice]:
        """Choices of one decision for each graph of which none saves less and has a better score.

        Args:
            score: of a choice that is extended by a decision: its score so far, the peak of the step while
                that graph runs, and the cost of its runs; None: it cannot be extended by that.
        """

        def extend(k: int, saved: int, so_far: int, decided: Candidate) -> tuple[int, int] | None:
            runs, nbytes = self._runs[k], decided.saved_bytes
            peak = saved + (runs - 1) * nbytes + self._others[k] + decided.peak_bytes
            value = score(so_far, peak, runs * decided.cost)
            return None if value is None else (saved + runs * nbytes, value)

        return combine(self._options, extend)

    @cached_property
    def _least(self) -> Choice:
        """The choice of the least peak."""
        found = self._choices(lambda so_far, peak, _: max(so_far, peak))
        return min(found, key=lambda choice: (choice[1], choice[0]))

    @cached_property
    def _lowest(self) -> list[Candidate]:
        """The decisions of the least peak found: that choice, and then another one for the highest graph."""
        chosen = [*self._least[2]]
        for _ in range(_ROUNDS):
            highest = self.highest(chosen)
            peak, before = max(highest), chosen
            k = highest.index(peak)
            for option in sorted(self._options[k], key=lambda o: o.peak_bytes)[:_LOW]:
                other = [*chosen[:k], option, *chosen[k + 1 :]]
                if max(self.highest(other)) < peak:
                    chosen, peak = other, max(self.highest(other))
            if chosen is before:
                break
        return chosen

    def _chosen(self, peak_bytes: int) -> list[Candidate] | None:
        """The cheapest choice within a peak; None where none is."""
        aim = peak_bytes
        for _ in range(_ROUNDS):
            found = self._choices(
                lambda so_far, peak, cost: so_far + cost if peak <= aim else None  # noqa: B023
            )
            if not found:
                return None
            decided = [*min(found, key=lambda choice: choice[1])[2]]
            over = max(self.highest(decided)) - peak_bytes
            if over <= 0:
                return decided
            aim -= over
        return None

    def _with_offloads(self, chosen: list[Candidate], peak_bytes: int) -> list[Candidate]:
        """Offloads in one graph after the other where that is cheaper, within what the rest leaves."""
        for k in sorted(range(len(chosen)), key=lambda k: (-chosen[k].cost, k)):
            planner, room = self._planners[k], peak_bytes - self.highest(chosen)[k]
            # What another graph's peak has no room for is found out below; less is asked for then.
            for part in dict.fromkeys((room // self._runs[k], 0)):
                found = planner.offloading.within(planner.peak(chosen[k]) + part, chosen[k])
                if found is None or found.cost >= chosen[k].cost:
                    break
                other = [*chosen[:k], found, *chosen[k + 1 :]]
                if max(self.highest(other)) <= peak_bytes:
                    chosen = other
                    break
        return chosen

    def _lowered_by_offloads(
        self, chosen: list[Candidate], peak_bytes: int
    ) -> list[Candidate] | None:
        """Offloads in one graph after the other until the step is within a peak; None if it never is."""
        for _ in range(_ROUNDS):
            highest = self.highest(chosen)
            over = max(highest) - peak_bytes
            if over <= 0:
                return chosen
            before = chosen
            at = highest.index(max(highest))
            # The graph where the peak is; else those that save while it runs, the most first.
            others = sorted(
                range(len(chosen)), key=lambda k: -self._runs[k] * chosen[k].saved_bytes
            )
            for k in dict.fromkeys((at, *others)):
                planner = self._planners[k]
                less = -(-over // self._runs[k])
                found = planner.offloading.within(planner.peak(chosen[k]) - less, None)
                other = chosen if found is None else [*chosen[:k], found, *chosen[k + 1 :]]
                if max(self.highest(other)) < max(highest):
                    chosen = other
                    break
            if chosen is before:
                return None
        return None

    def _searched(self, chosen: list[Candidate], peak_bytes: int) -> list[Candidate]:
        """Searches a cheaper decision for one graph after the other, within what the rest leaves."""
        dearest = sorted(range(len(chosen)), key=lambda k: (-self._runs[k] * chosen[k].cost, k))
        for k in dearest[:_SEARCHED]:
            alone = self._planners[k].is_alone  # a named solver's decisions are its own
            if alone or not chosen[k].cost or chosen[k].decision.offloads:
                continue
            planner, highest = self._planners[k], self.highest(chosen)
            room = [(peak_bytes - h) // self._runs[k] for h in highest]
            capacity = chosen[k].saved_bytes + min(room[k + 1 :], default=planner.full_bytes)
            within = planner.peak(chosen[k]) + room[k]
            found = planner.searched(within, chosen[k], capacity=capacity)
            if found is not None and found.cost < chosen[k].cost:
                other = [*chosen[:k], found, *chosen[k + 1 :]]
                chosen = other if max(self.highest(other)) <= peak_bytes else chosen
        return chosen

    def _cost(self, decided: Sequence[Candidate]) -> int:
        return sum(runs * d.cost for runs, d in zip(self._runs, decided, strict=True))
