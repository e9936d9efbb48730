"""Plan several graphs of one step, such as a model with graph breaks, within one peak of the whole step.

While one graph runs, the values that other graphs have saved are also alive. The peak of the step therefore depends on
the decisions of all graphs together: one decision per graph, which states the values that the graph saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from torch import fx

from remat.errors import BudgetError
from remat.graph.memory.liveness_of_graphs import highest_of_graphs
from remat.graph.problems.lowering import Decision
from remat.graph.verify import Split
from remat.planning.pipelines import modules_of
from remat.planning.search.aim import aim
from remat.planning.search.all_peaks import frontier_by_peak
from remat.planning.search.candidates import Candidate, Combination, Together, combine
from remat.planning.search.effort import DEFAULT
from remat.planning.search.pool import CandidatePool, Limits
from remat.planning.search.search import Search
from remat.units import Budget, bytes_of_share, format_bytes

#: Key of equal graphs: their digest, and the names of their nodes.
Same = tuple[str, tuple[str, ...]]


class SeveralGraphs:
    """Search for decisions, one for each graph of a step, that keep the whole step within a peak.

    A graph that runs several times in a step has one decision for all of its runs. A *combination* is one decision for
    each graph, with their summed saved bytes and a score, such as the summed cost.

    Args:
        searches: one search for each graph, in the order in which the graphs run forward.
    """

    def __init__(self, searches: Sequence[Search]) -> None:
        self._searches = searches
        self.runs = [s.context.state.joint.runs for s in searches]
        self._modules: dict[tuple[Same, Decision], tuple[fx.GraphModule, fx.GraphModule]] = {}

    def highest(self, decided: Sequence[Candidate]) -> tuple[int, ...]:
        """Return, for each graph, the most bytes alive in the whole step while this graph runs, forward or backward.

        Args:
            decided: one candidate for each graph.
        """
        return tuple(map(max, highest_of_graphs([*map(self._split, range(len(decided)), decided)])))

    def peak(self, decided: Sequence[Candidate]) -> int:
        """Return the most bytes alive in the whole step under one candidate for each graph."""
        return max(self.highest(decided))

    def search_within(self, budget: Budget) -> list[Candidate]:
        """Return the cheapest decisions found, one for each graph, that keep the step within a budget on its peak.

        Raises:
            BudgetError: no such decisions were found; the message names the least peak that was found.
        """
        peak_bytes = budget.peak_bytes
        cheapest = [s.decisions.allowed_cheapest for s in self._searches]
        # These decisions cost least, so they are the result if they are within the peak. If values are tagged for
        # offloading, others may be cheaper, because operators may wait for copies.
        tagged = any(s.context.tagged for s in self._searches)
        if peak_bytes is not None and not tagged and self.peak(cheapest) <= peak_bytes:
            return cheapest
        at_budget_one, lowest = (
            [s.decisions.allowed_at_budget_one for s in self._searches],
            self._lowest,
        )
        least = self.peak(lowest)
        if peak_bytes is None:
            most = self.peak(at_budget_one)
            # `_lowest` starts from estimated peaks, so the decisions for budget 1 may have a lower peak.
            least = min(least, most)
            peak_bytes = least + bytes_of_share(budget.peak_share or 0.0, most - least)
        limits = Limits(peak_bytes=peak_bytes, measure=lambda chosen: self.peak(chosen.each))
        pool = CandidatePool(self._chosen(limits))
        pool.add(*map(self._together, (self._searched(lowest, least), at_budget_one)))
        best = pool.cheapest(limits)
        # The link is an option of the step, so either all graphs may offload or none.
        offloads = all(s.context.request.offload is not None for s in self._searches)
        if best is None and offloads and (low := self._lowered_by_offloads(lowest, peak_bytes)):
            best = self._together(low)
        if best is None:
            raise BudgetError(
                f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes), and no plans of these "
                f"{len(at_budget_one)} graphs were found within it: the least peak of any found is "
                f"{format_bytes(least)} ({least} bytes): weights, gradients and what one operator needs at "
                "once do not shrink with the budget. Raise the budget, or make the model or the batch smaller"
            )
        chosen = self._searched([*best.each], peak_bytes)
        return self._with_offloads(chosen, peak_bytes) if offloads else chosen

    def _together(self, decided: Sequence[Candidate]) -> Together:
        """Combine candidates, one for each graph, into a candidate for the whole step."""
        return Together(
            each=tuple(decided),
            cost=self.cost(decided),
            saved_bytes=self.saved_bytes(decided),
        )

    def _split(self, k: int, decided: Candidate) -> Split:
        """Split graph ``k`` into two modules by a decision; equal graphs share the result."""
        search = self._searches[k]
        key = self._same[k], decided.decision
        if key not in self._modules:
            self._modules[key] = modules_of(search.measures.split_of(decided))
        forward, backward = self._modules[key]
        joint = search.context.state.joint
        return Split(joint=joint, forward=forward, backward=backward)

    @cached_property
    def _same(self) -> list[Same]:
        """For each graph of the step, a key that is equal for equal graphs."""
        return [*map(_identity, self._searches)]

    @cached_property
    def _options(self) -> list[list[Candidate]]:
        """For each graph of the step, the candidates among which a combination chooses one."""
        # Equal graphs, such as equal layers, are decided once and share their candidates.
        by_graph: dict[Same, list[Candidate]] = {}
        for key, search in zip(self._same, self._searches, strict=True):
            if key in by_graph:
                continue
            candidate, decisions = search.schedules.candidate, search.decisions
            by_saved = (*decisions.pareto(), decisions.allowed_at_budget_one, decisions.cheapest)
            candidates = frontier_by_peak(search)[0]
            candidates += [replace(d, peak_bytes=candidate(d.saved).peak_bytes) for d in by_saved]
            by_graph[key] = [*filter(search.context.may_save, candidates)]
        return [by_graph[key] for key in self._same]

    @cached_property
    def _others(self) -> list[int]:
        """For each graph, the bytes of other graphs, such as parameters, that are alive at the peak of this graph."""
        # Other decisions than those at budget 1 hardly change these bytes.
        at_budget_one = [s.decisions.allowed_at_budget_one for s in self._searches]
        saved, others = 0, []
        highest = self.highest(at_budget_one)
        for k, (search, decided) in enumerate(zip(self._searches, at_budget_one, strict=True)):
            saved += self.runs[k] * decided.saved_bytes
            others.append(
                highest[k] - search.measures.simulated(decided) - (saved - decided.saved_bytes)
            )
        return others

    def _combinations(self, score: Callable[[int, int, int], int | None]) -> list[Combination]:
        """Return the Pareto-optimal combinations by (saved bytes, score); the function ``score`` adds up scores."""

        def extend(k: int, saved: int, so_far: int, decided: Candidate) -> tuple[int, int] | None:
            runs, nbytes = self.runs[k], decided.saved_bytes
            # At the last run of this graph, its earlier runs and all earlier graphs have saved their values.
            peak = saved + (runs - 1) * nbytes + self._others[k] + decided.peak_bytes
            value = score(so_far, peak, runs * decided.cost)
            return None if value is None else (saved + runs * nbytes, value)

        return combine(self._options, extend)

    @cached_property
    def _least(self) -> Combination:
        """The combination of decisions with the least estimated peak of the step, then with the fewest saved bytes."""
        return self._combinations(lambda so_far, peak, _: max(so_far, peak))[-1]

    @cached_property
    def _lowest(self) -> list[Candidate]:
        """The candidates, one per graph, with which the step has the lowest peak found."""
        # `_least` has the least estimated peak, so the split graphs may peak elsewhere.
        chosen = [*self._least[2]]
        for _ in range(DEFAULT.several.rounds):
            highest = self.highest(chosen)
            peak, before = max(highest), chosen
            k = highest.index(peak)
            for option in sorted(self._options[k], key=lambda o: o.peak_bytes)[
                : DEFAULT.several.low
            ]:
                other = [*chosen[:k], option, *chosen[k + 1 :]]
                if self.peak(other) < peak:
                    chosen, peak = other, self.peak(other)
            if chosen is before:
                break
        return chosen

    def _chosen(self, limits: Limits) -> Iterator[Together]:
        """Yield cheap decisions, one per graph, with which the peak of the step approaches a limit."""

        def ask(peak_bytes: int) -> Together | None:
            combinations = self._combinations(
                lambda so_far, peak, cost: so_far + cost if peak <= peak_bytes else None
            )
            return (
                self._together(combinations[-1][2]) if combinations else None
            )  # the last one costs least

        peak = int(limits.peak_bytes)
        return aim(ask, limits.measure, peak, start=peak, rounds=DEFAULT.several.rounds)

    def _with_offloads(self, chosen: list[Candidate], peak_bytes: int) -> list[Candidate]:
        """Offload values in each graph if that lowers the cost of its decision and keeps the step within the peak."""
        for k in sorted(range(len(chosen)), key=lambda k: (-chosen[k].cost, k)):
            search, room = self._searches[k], peak_bytes - self.highest(chosen)[k]
            # The first attempt lets this graph's peak rise by the room that is left. That may raise the peak while
            # other graphs run, which is checked below. The second attempt keeps this graph's peak as it is.
            for part in dict.fromkeys((room // self.runs[k], 0)):
                peak = search.measures.simulated(chosen[k])
                candidate = search.offloads.with_offloads(peak + part, chosen[k])
                if candidate is None or candidate.cost >= chosen[k].cost:
                    break
                other = [*chosen[:k], candidate, *chosen[k + 1 :]]
                if self.peak(other) <= peak_bytes:
                    chosen = other
                    break
        return chosen

    def _lowered_by_offloads(
        self, chosen: list[Candidate], peak_bytes: int
    ) -> list[Candidate] | None:
        """Offload values in one graph after another until the step is within a peak; None if the step stays above."""
        for _ in range(DEFAULT.several.rounds):
            highest = self.highest(chosen)
            over = max(highest) - peak_bytes
            if over <= 0:
                return chosen
            before = chosen
            at = highest.index(max(highest))
            # First the graph during which the step peaks, then the others: values that they saved may be alive at
            # the peak.
            others = sorted(range(len(chosen)), key=lambda k: -self.runs[k] * chosen[k].saved_bytes)
            for k in dict.fromkeys((at, *others)):
                search = self._searches[k]
                # The values of all runs are alive at the peak, so each run saves its part of the excess less.
                less = -(-over // self.runs[k])
                peak = search.measures.simulated(chosen[k])
                candidate = search.offloads.with_offloads(peak - less, None)
                other = chosen if candidate is None else [*chosen[:k], candidate, *chosen[k + 1 :]]
                if self.peak(other) < max(highest):
                    chosen = other
                    break
            if chosen is before:
                return None
        return None

    def _searched(self, chosen: list[Candidate], peak_bytes: int) -> list[Candidate]:
        """Search for cheaper decisions on the costliest graphs, within the bytes that the other graphs leave free."""
        dearest = sorted(range(len(chosen)), key=lambda k: (-self.runs[k] * chosen[k].cost, k))
        for k in dearest[: DEFAULT.several.searched]:
            alone = self._searches[k].context.is_alone  # a named solver decides alone
            if alone or not chosen[k].cost or chosen[k].decision.offloads:
                continue
            search, highest = self._searches[k], self.highest(chosen)
            room = [(peak_bytes - h) // self.runs[k] for h in highest]
            # Values that this graph saves are alive while later graphs run. So the free bytes during later graphs limit
            # the bytes that this graph may save.
            capacity = chosen[k].saved_bytes + min(room[k + 1 :], default=search.context.full_bytes)
            limits = search.limits(search.measures.simulated(chosen[k]) + room[k])
            most = min(capacity, capacity if limits.saved_bytes is None else limits.saved_bytes)
            candidate = search.searched(replace(limits, saved_bytes=most), chosen[k])
            if candidate is not None and candidate.cost < chosen[k].cost:
                other = [*chosen[:k], candidate, *chosen[k + 1 :]]
                chosen = other if self.peak(other) <= peak_bytes else chosen
        return chosen

    def cost(self, decided: Sequence[Candidate]) -> int:
        """Return the summed cost that decisions, one per graph, add to all runs of their graphs."""
        return sum(runs * d.cost for runs, d in zip(self.runs, decided, strict=True))

    def saved_bytes(self, decided: Sequence[Candidate]) -> int:
        """Return the bytes that all runs of all graphs save together, under one decision for each graph."""
        return sum(runs * d.saved_bytes for runs, d in zip(self.runs, decided, strict=True))


def _identity(search: Search) -> Same:
    """Return a key by which to compare graphs: equal keys mean equal graphs with equal names of nodes."""
    context = search.context
    return context.fingerprint, tuple(n.name for n in context.state.index.nodes)
