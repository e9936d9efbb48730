"""The search for candidates of one graph within a peak, simulated or estimated.

Every search goes the same way. Proposers are asked at a limit on the peak of their step problem; the candidates join one
pool; a measure says what their peaks are; `aim` corrects the limit by the difference; the pool chooses. The simulated
peak is that of the step problem, so one round suffices. Estimated peaks differ, by similar bytes for similar candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from remat.errors import BudgetError
from remat.planning.context import GraphContext
from remat.planning.plan_text import learned_text
from remat.planning.search.aim import aim
from remat.planning.search.bound import PeakBounds, bound_with_offloads
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT, ESTIMATED, SIMULATED, Effort, Rounds
from remat.planning.search.measures import Measures
from remat.planning.search.near import Near, near_fused
from remat.planning.search.pool import CandidatePool, Limits, Measure, cost_of, scheduled_peak
from remat.planning.search.proposers.hull import Starts
from remat.planning.search.proposers.offloads import Offloads
from remat.planning.search.proposers.solver import SolverDecisions
from remat.planning.search.schedules import Schedules
from remat.units import Budget, bytes_of_share, format_bytes

#: Text for error messages: why no budget lowers the peak further, and what else lowers it.
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget: raise it, or make the "
    "model or the batch smaller"
)


class Search:
    """Candidates of one graph within any peak, and what finds them.

    Args:
        context: the prepared graph.
        effort: limits on the work of each search.

    Attributes:
        context: the prepared graph.
        effort: limits on the work of each search.
        measures: peaks of the candidates.
        decisions: decisions of the solver at limits on saved bytes.
        pool: all candidates that were found.
        rounds_run: how often prices and node orders were searched.
    """

    def __init__(self, context: GraphContext, effort: Effort = DEFAULT) -> None:
        self.context, self.effort = context, effort
        self.measures = Measures(context.state, context.on_step)
        self.decisions = SolverDecisions(context, self.measures)
        self.pool = CandidatePool[Candidate]()
        self.rounds_run: Counter[str] = Counter()

    @cached_property
    def schedules(self) -> Schedules:
        """The decisions by the peaks of their schedules."""
        return Schedules(self.context)

    @cached_property
    def simulated(self) -> Near:
        """The searches of the graph's own step problem, whose peaks are simulated peaks."""
        return Near.of(self.schedules, self.effort)

    @cached_property
    def starts(self) -> Starts:
        """Decisions that searches within a peak start from."""
        return Starts(self.context, self.decisions, self.schedules)

    @cached_property
    def bounds(self) -> PeakBounds:
        """Lower bounds on the cost of decisions without offloads, within any peak."""
        return PeakBounds(self.context.state, self.context.lowered.problem)

    @cached_property
    def offloads(self) -> Offloads:
        """The search for values to offload."""
        near = self.simulated
        return Offloads(self.context, self.measures, self.decisions, near.prices, near.orders)

    def adopt(self, other: Search) -> bool:
        """Copy what a search on another trace of the graph has decided and measured.

        Nothing is copied unless both have equal graphs, and equal options except the budget.

        Returns:
            Whether decisions, peaks and candidates were copied.
        """
        if not self.context.like(other.context):
            return False
        self.decisions.adopt(other.decisions)
        self.measures.adopt(other.measures)
        self.pool.add(*(replace(d, lowered=self.context.lowered) for d in other.pool))
        return True

    def add(self, *found: Candidate) -> None:
        """Add candidates that the user's code allows to the pool, with their tagged values offloaded."""
        allowed = filter(self.context.may_save, found)
        self.pool.add(*map(self.offloads.with_tagged, allowed))

    def limits(self, peak_bytes: int, measure: Measure | None = None) -> Limits:
        """Return the limits of a candidate whose peak is within ``peak_bytes``, by the simulated peak or a given measure."""
        return Limits(
            peak_bytes=peak_bytes,
            saved_bytes=self.context.most_saved,
            measure=measure or self.measures.simulated,
        )

    def _rounds(self, measure: Measure) -> Rounds:
        return SIMULATED if measure == self.measures.simulated else ESTIMATED

    # ---- within a simulated peak --------------------------------------------------------------------
    def within_peak(
        self, peak_bytes: int, *, least: int | None = None, offload: bool = True
    ) -> Candidate:
        """Return the cheapest candidate found whose simulated peak is within a limit.

        Args:
            peak_bytes: limit on the peak, in bytes.
            least: the peak of ratio 0, if the limit is a ratio of the peak. Candidates at the least peak compete then,
                too, so that a higher ratio does not cost more than ratio 0.
            offload: whether untagged values may be offloaded. Tagged values are offloaded in any case.

        Raises:
            BudgetError: no candidate was found within the limit; the message names the least peak that was found.
        """
        offloads, without = self.offloads, None
        may_offload = offload and self.context.may_offload
        try:
            found = without = self._within(peak_bytes, least)
        except BudgetError:
            # Offloading cannot go below this bound.
            possible = may_offload and peak_bytes >= self.schedules.least_possible
            lowered = offloads.with_offloads(peak_bytes, None) if possible else None
            if lowered is None:
                raise
            found = lowered
        if may_offload and without is not None:
            found = offloads.with_offloads(peak_bytes, without) or without
        return self._bounded(offloads.with_tagged(found), peak_bytes)

    def _within(self, peak_bytes: int, least: int | None) -> Candidate:
        """Return the cheapest candidate found within a peak, without offloads; arguments as in `within_peak`."""
        context, limits = self.context, self.limits(peak_bytes)
        cheapest = self.offloads.with_tagged(self.decisions.allowed_cheapest)
        if limits.allow(cheapest):
            return cheapest
        asked = f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes)"
        # Hooks may pack saved values into fewer bytes, so the bound on the peak does not hold with hooks.
        possible = 0 if context.request.hooks else self.schedules.least_possible
        if peak_bytes < possible:
            raise self._none_within(asked, possible, infeasible=True)
        context.on_step(f"searching within a peak of {format_bytes(peak_bytes)}")
        self.propose(limits)
        if not context.is_alone and not context.request.hooks:
            self._widen(limits, least)
        best = self.pool.cheapest(limits, self._by_cost)
        if best is None:
            raise self._none_within(asked, possible)
        return best

    def choose_again(self, found: Mapping[int, Candidate]) -> dict[int, Candidate]:
        """Choose again for each limit of a ladder, among the candidates of all limits.

        So no larger limit costs more than a smaller one, and no smaller one has the higher peak.

        Args:
            found: by limit on the simulated peak in bytes, the candidate that was found within it.
        """
        pool = CandidatePool([*found.values(), *self.pool])
        chosen = {}
        for peak_bytes, before in found.items():
            best = pool.cheapest(self.limits(peak_bytes), self._by_cost)
            same = best is None or best.decision == before.decision
            chosen[peak_bytes] = before if same or best is None else self._bounded(best, peak_bytes)
        return chosen

    def _by_cost(self, found: Candidate) -> tuple[int, int, int]:
        """Return the sort key (cost, simulated peak, saved bytes)."""
        return found.cost, self.measures.simulated(found), found.saved_bytes

    def _widen(self, limits: Limits, least: int | None) -> None:
        """Add candidates that the search within a simulated peak misses, each where it may be cheaper.

        Args:
            limits: the limits.
            least: as in `within_peak`.
        """
        best, peak_bytes = self.pool.cheapest(limits, cost_of), int(limits.peak_bytes)
        if best is None:
            return
        if least is not None and least < peak_bytes:
            lowest = self.schedules.tried(self.least_peak.saved)
            if self.bounds.bound(least, self.schedules.highest(lowest)) <= best.cost:
                # The search that ratio 0 makes, which may be cheaper.
                self.close_in(replace(limits, peak_bytes=least))
                best = self.pool.cheapest(limits, cost_of) or best
        if best.cost and limits.measure(best) < self.effort.slack * peak_bytes:
            # On some large graphs, the search ends far below the limit, and a decision of the solver is cheaper.
            low, high = self.starts.between(peak_bytes)
            self.add(
                *self.decisions.bisected(low, high, peak_bytes, self.effort.closing, limits.measure)
            )

    # ---- within a simulated or an estimated peak -----------------------------------------------------
    def propose(self, limits: Limits) -> None:
        """Ask the proposers for candidates within limits, and add all candidates to the pool.

        If the user named another solver than ``auto``, only this solver's decisions are added. If nothing is found
        within a simulated peak, the least peak is searched, and slightly lower limits lead past other decisions.
        """
        context, decisions = self.context, self.decisions
        self.add(decisions.allowed_full)
        if context.is_alone:
            self.add(*decisions.swept(limits))
            if "schedule" in context.request.solver.solves and not context.request.hooks:
                self._scheduled(limits)
            return
        self.close_in(limits)
        exact = self._rounds(limits.measure) is SIMULATED
        if not exact or not (context.request.hooks or self.pool.cheapest(limits, cost_of) is None):
            return
        # With hooks, which pack saved values, the peaks of the search differ from those of the step.
        self.add(self.least_peak, *decisions.swept(limits))
        if cheapest := self.pool.cheapest(limits, cost_of):
            self.close_in(limits, cheapest)
        if not context.request.hooks:
            small = len(context.state.index) <= self.effort.small
            for part in self.effort.lower[: None if small else 1]:
                lower = int(part * limits.peak_bytes)
                if lower >= self.schedules.least_possible:
                    self.close_in(replace(limits, peak_bytes=lower))

    def searched(self, limits: Limits, *starts: Candidate) -> Candidate | None:
        """Search within limits by the simulated peak; return the cheapest candidate of the pool, None if there is none.

        Args:
            limits: the limits.
            starts: candidates to start from, in addition to those of `Starts.within`.
        """
        self.close_in(limits, *starts)
        best = self.pool.cheapest(limits, cost_of)
        return None if best is None else self._bounded(best, int(limits.peak_bytes))

    def close_in(self, limits: Limits, *starts: Candidate) -> None:
        """Search by prices of memory, then by node orders, until a measured peak is just within its limit.

        Node orders are not searched if a candidate within the limits costs next to nothing.

        Args:
            limits: the limits, with the measure.
            starts: candidates to start from, in addition to those that each search starts from.
        """
        last, rounds = self._by_prices(limits, starts), self._rounds(limits.measure)
        negligible = int(rounds.negligible * self.context.step_cost)
        if self.context.request.hooks or self.pool.cheapest(replace(limits, cost=negligible)):
            return
        for start, searches in self._ordered_from(limits, last):
            self._by_orders(limits, start, searches)

    def _by_prices(self, limits: Limits, starts: Iterable[Candidate]) -> Candidate:
        """Search in the node order of the passes; add each candidate, and return the last one."""
        wanted, exact = int(limits.peak_bytes), self._rounds(limits.measure) is SIMULATED
        last = None if exact else self.nearest(limits)
        near = self.near(limits.measure, last)
        # A search goes on from what is known within its limits, such as the result for a smaller budget.
        best = self.pool.cheapest(limits, cost_of) if exact else None
        known = [] if best is None else [best]
        if not exact:
            known = [d for d in self.pool if not d.decision.is_ordered]
        seeds = [d.saved for d in (*starts, *known)]
        if exact or not seeds:
            seeds += self.starts.within(wanted)

        def ask(peak_bytes: int) -> Candidate:
            self.rounds_run["by prices"] += 1
            within = Limits(peak_bytes=peak_bytes, saved_bytes=limits.saved_bytes)
            return self.decisions.informed(
                near.prices.within(within, seeds, orders=near.orders.is_possible)
            )

        rounds, start = self._rounds(limits.measure).prices, wanted + near.offset
        for found in aim(ask, limits.measure, wanted, start=start, rounds=rounds, last=last):
            self.add(found)
            last = found
        assert last is not None, "there is at least one round"
        return last

    def _ordered_from(self, limits: Limits, last: Candidate) -> Iterator[tuple[Candidate, int]]:
        """Yield the candidates that searches over node orders start from, each with its number of searches.

        By the simulated peak: the result of the search by prices. If this result exceeds the peak, the cheapest
        candidate within the limits follows. By the estimated peak: the candidate with the least peak, and one of low
        cost whose peak may slightly exceed the limit. The two lead to different local optima.
        """
        rounds = self._rounds(limits.measure)
        if not rounds.from_least:
            best = self.pool.cheapest(limits, cost_of)
            yield last, rounds.orders
            if best is not None and best.schedule and last.peak_bytes > limits.peak_bytes:
                yield best, rounds.orders
            return
        least = self.lowest_by(limits.measure)
        yield least, rounds.from_least
        above = replace(limits, peak_bytes=rounds.above * limits.peak_bytes)
        start = self.pool.cheapest(above, cost_of) or self.nearest(limits)
        if start is not least:
            yield start, rounds.orders

    def _by_orders(self, limits: Limits, start: Candidate, searches: int) -> None:
        """Search node orders for cheaper candidates within limits, and add them to the pool.

        The first search starts from ``start``; each later one from the cheapest candidate near the limit that these
        searches found. Its limit is corrected by the mean difference between the peaks in the step problem and the
        measured peaks of these candidates. The limit falls with each search in a row that finds nothing within it.

        Args:
            limits: the limits, with the measure.
            start: the candidate that the first search starts from.
            searches: maximum number of searches.
        """
        context, rounds, wanted = self.context, self._rounds(limits.measure), int(limits.peak_bytes)
        near, own = self.near(limits.measure, start), CandidatePool([start])
        exact = rounds is SIMULATED
        # The simulated peak is that of the schedule, which is known already.
        counted, among = (
            (replace(limits, measure=scheduled_peak), own) if exact else (limits, self.pool)
        )
        above = replace(counted, peak_bytes=rounds.above * wanted)
        offset, offsets, misses, idle = near.offset, list[int](), 0, 0
        least = among.cheapest(counted, cost_of)
        for _ in range(searches):
            self.rounds_run["by node orders"] += 1
            seen = {d.decision for d in self.pool}
            limit = wanted + offset - misses * int(rounds.lowered * wanted)
            made = filter(context.may_save, near.orders.within(start, limit, share=rounds.share))
            new = [d for d in made if d.decision not in seen and d.schedule != start.schedule]
            own.add(*new)
            informed = [self.offloads.with_tagged(self.decisions.informed(d)) for d in new]
            self.pool.add(*informed)
            reached = [*map(counted.measure, new if exact else informed)]
            offsets += [d.peak_bytes - peak for d, peak in zip(new, reached, strict=True)]
            before, least = least, among.cheapest(counted, cost_of)
            better = least is not None and (before is None or least.cost < before.cost)
            idle = 0 if better else idle + 1
            misses = 0 if any(peak <= wanted for peak in reached) else misses + 1
            if (least is not None and not least.cost) or idle == rounds.idle:
                return
            offset = sum(offsets) // len(offsets) if offsets else offset
            start = (
                own.cheapest(above, cost_of) or CandidatePool(new).cheapest(rank=cost_of) or start
            )

    def near(self, measure: Measure, candidate: Candidate | None) -> Near:
        """Return searches whose peaks are those of a measure plus a constant, for schedules near that of a candidate."""
        if candidate is None or self._rounds(measure) is SIMULATED:
            return self.simulated
        return near_fused(self.measures.split_of(candidate), self.schedules, self.effort)

    def nearest(self, limits: Limits) -> Candidate:
        """Return the candidate of the pool whose measured peak is nearest to a limit."""
        best = self.pool.cheapest(rank=lambda d: abs(limits.measure(d) - limits.peak_bytes))
        assert best is not None, "there are candidates"
        return best

    def lowest_by(self, measure: Measure) -> Candidate:
        """Return the candidate of the pool with the least measured peak."""
        best = self.pool.cheapest(rank=measure)
        assert best is not None, "there are candidates"
        return best

    def _scheduled(self, limits: Limits) -> None:
        """Ask the user's solver for a schedule within a peak, and add the schedule to the pool.

        Nothing is added if the solver finds no schedule.
        """
        context, request = self.context, self.context.request
        context.on_step(f"searching for a schedule by '{request.solver.name}'")
        exact = self._rounds(limits.measure) is SIMULATED
        start = replace(self.least_peak, schedule=None) if exact else self.nearest(limits)
        near = self.near(limits.measure, start)
        limit = int(limits.peak_bytes) + near.offset
        if found := near.orders.solved(request.solver, start, limit, request.time_limit):
            self.add(self.decisions.informed(found, "scheduled by the solver"))

    def _none_within(self, asked: str, possible: int, *, infeasible: bool = False) -> BudgetError:
        """Return the error for a limit on the peak within which no plan was found.

        Args:
            asked: the budget, as text.
            possible: lower bound on the peak of every schedule, in bytes; 0 if none is known.
            infeasible: whether the limit is below ``possible``.
        """
        context, least = self.context, self.least_found
        alive = f"{possible} bytes ({format_bytes(possible)})"
        if infeasible:
            why = (
                f", which is infeasible: every schedule of this step has a peak of at least {alive}"
            )
        else:
            whose = f" by '{context.request.solver.name}'" if context.is_alone else ""
            proven = (
                f"; it is proven only that no schedule has less than {alive}" if possible else ""
            )
            why = f", and no plan was found within it{whose}{proven}"
        held = ""
        if context.state.policies or (context.state.plain is not None and not context.state.chunk):
            named = context.state.policies or "by remat.region"
            held = f". All plans follow the policies {named}; others may lower the least peak"
        return BudgetError(
            f"{asked}{why}. The least peak of any plan found is {format_bytes(least)} ({least} bytes); "
            f"{context.request.how_to_run(least)}. {_UNSHRUNK}{held}{learned_text(context.state.index.nodes)}"
        )

    def peak_of(self, budget: Budget, ends: tuple[int, int] | None = None) -> int:
        """Convert a budget on the peak to bytes.

        Args:
            budget: a budget on the peak, in bytes or as a ratio.
            ends: peaks in bytes that the ratios 0 and 1 stand for; None: the least peak found, and the peak of the
                plan for budget 1.
        """
        if budget.peak_bytes is not None:
            return budget.peak_bytes
        full = self.decisions.allowed_full
        least, most = ends or (self.least_found, self.measures.simulated(full))
        return least + bytes_of_share(budget.peak_share or 0.0, most - least)

    @cached_property
    def least_found(self) -> int:
        """The least peak found, in bytes: of `least_peak`, the decision at budget 1, and the cheapest decision."""
        decisions = self.decisions
        found = self.least_peak, decisions.allowed_cheapest, decisions.allowed_full
        return min(map(self.measures.simulated, found))

    @cached_property
    def least_peak(self) -> Candidate:
        """The candidate with the least peak that was found.

        With the solver ``auto``, remat searches for this candidate. If the user named another solver, this is its
        decision with the least peak, of those at several limits on saved bytes.
        """
        context, decisions = self.context, self.decisions
        found = CandidatePool([decisions.allowed_full])
        if context.is_alone:
            found.add(*decisions.on_frontier())
        else:
            seeds = [
                *(saved for _, saved in context.cuts(4 * self.effort.vertices)),
                *self.starts.within(0),
            ]
            # With hooks, which pack saved values, the lowest peak of the search may not be that of the step. Therefore,
            # decisions at several limits on saved bytes compete, too.
            if context.request.hooks:
                found.add(*decisions.on_frontier())
            found.add(*map(decisions.informed, self.lowest(self.simulated, seeds)))
        self.add(*found)
        simulated = self.measures.simulated
        allowed = Limits(saved_bytes=context.most_saved)
        best = found.cheapest(allowed, lambda d: (simulated(d), d.cost))
        assert best is not None, "the decision at budget 1 is allowed"
        return best

    def lowest(
        self, near: Near, seeds: Iterable[Iterable[int]], rounds: Rounds = SIMULATED
    ) -> list[Candidate]:
        """Search for the candidate with the least peak in a step problem.

        Args:
            near: the searches of the step problem.
            seeds: decisions to start from, each as its saved nodes of the graph problem; at least one.
            rounds: says how many edits a search over node orders tries.

        Returns:
            One or two candidates. First, the best one in the node order of the passes. Second, if one was found, the
            best one with node orders of its own, which may save more bytes than the user's code allows.
        """
        # No schedule has a peak of 0 bytes, so under this limit the search returns the lowest peaks that it reaches.
        limits = Limits(peak_bytes=0, saved_bytes=self.context.most_saved)
        reached = CandidatePool(near.prices.reached(limits, seeds))
        best, lower = reached.cheapest(rank=limits.rank), None
        if not self.context.request.hooks:
            lower = near.orders.lowest(reached, rounds.lower)
        return [d for d in (best, lower) if d is not None]

    def _bounded(self, found: Candidate, peak_bytes: int) -> Candidate:
        """Return a copy of a candidate with a lower bound in its provenance.

        No decision whose peak is at most ``peak_bytes`` costs less than the bound, not even one with offloads if values
        may be offloaded. With hooks on saved tensors, the bound is 0, because hooks may change the bytes of saved values.
        The cheapest decision keeps its own bound.
        """
        if found.decision == self.decisions.allowed_cheapest.decision:
            return found
        # The bound that `found` has may hold for a limit on saved bytes, so it does not hold for a peak.
        context, bound = self.context, 0
        if not context.request.hooks:
            moments = self.schedules.highest(self.schedules.tried(found.saved))
            if context.may_offload:
                bound = bound_with_offloads(context, self.bounds, peak_bytes, moments)
            else:
                bound = self.bounds.bound(peak_bytes, moments)
        return replace(found, provenance=replace(found.provenance, recompute_bound=bound))
