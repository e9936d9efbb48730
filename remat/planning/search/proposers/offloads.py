"""Propose decisions that offload some values to the host's memory, and save or recompute other values.

The search represents a decision with offloads as an `OffloadPlan`, in nodes of the schedule problem. Afterwards, the
copies of offloaded values are scheduled in forward and backward, and the offload plan becomes a `Candidate`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from remat.graph.memory.host_copies import host_bytes_of, is_pinned
from remat.graph.problems.lowering import Decision, Offload, SavedKind
from remat.passes.hooks.offload_saved import OffloadSaved, traced_offloads
from remat.planning.context import GraphContext
from remat.planning.pipelines import SPLIT, PassManager
from remat.planning.search.candidates import WITH_OFFLOADS, Candidate
from remat.planning.search.effort import DEFAULT
from remat.planning.search.measures import Measures
from remat.planning.search.offload_copies import Copies
from remat.planning.search.offload_costs import Tagged, check_host_memory, why_kept
from remat.planning.search.pool import Limits
from remat.planning.search.proposers.orders import Orders
from remat.planning.search.proposers.prices import PriceSearch
from remat.planning.search.proposers.solver import SolverDecisions
from remat.solvers.schedule.offload_problem import OffloadPlan, OffloadProblem
from remat.solvers.schedule.offload_search import OffloadSearch


class Offloads:
    """Search for the values of one prepared graph that should be offloaded to the host.

    Args:
        context: the prepared graph.
        measures: peaks of the graph's candidates.
        decisions: decisions of the solver, from which searches start.
        prices: the search by prices of memory.
        orders: the search over node orders.
    """

    def __init__(
        self,
        context: GraphContext,
        measures: Measures,
        decisions: SolverDecisions,
        prices: PriceSearch,
        orders: Orders,
    ) -> None:
        self._context, self._measures, self._decisions = context, measures, decisions
        self._prices, self._orders, self._schedules = prices, orders, prices.schedules
        self.state, self.request, self.lowered = context.state, context.request, context.lowered
        self.host_bytes = context.request.host_memory
        #: Dict from the name of each value that could not be offloaded to the reason.
        self._left_out: dict[str, str] = {}
        #: Cached results of `with_tagged`, by decision.
        self._with_tagged: dict[Decision, Candidate] = {}

    @cached_property
    def _node_of(self) -> list[int]:
        """For each node of the graph problem, the schedule problem's node of the same value; -1 if there is none."""
        of_value, problem = self._schedules.lowered_schedule.of_value, self.lowered.problem
        return [
            of_value.get(name, -1) if size and save else -1
            for name, size, save in zip(problem.names, problem.size, problem.savable, strict=True)
        ]

    def with_offloads(self, peak_bytes: int, without: Candidate | None) -> Candidate | None:
        """Return a decision with offloads that is within a simulated peak and costs less than ``without``.

        Args:
            peak_bytes: limit on the peak of the device's memory, in bytes.
            without: the best decision without offloads; None if no such decision is within the peak.

        Returns:
            A decision with offloads that is cheaper than ``without``. If none was found, ``without``, which may be
            None.
        """
        if without is not None and not without.cost:
            return without  # offloads cannot make it cheaper
        self._context.on_progress("searching for values to offload")
        aimed = peak_bytes
        for _ in range(DEFAULT.offloading.rounds):
            most, excess = math.inf if without is None else without.cost, []
            for offload_plan, decision in self._candidates(aimed, without):
                if not offload_plan.offloaded or offload_plan.over or offload_plan.cost >= most:
                    continue
                decided, over = self._as_candidate(offload_plan, decision, peak_bytes)
                if decided is not None and not over:
                    over = max(0, self._measures.simulated(decided) - peak_bytes)
                    if not over and decided.cost < most:
                        return decided
                excess.append(over)
                if len(excess) == DEFAULT.offloading.placed:
                    break
            # The split graphs may need more memory than the search assumed, so the next round aims lower. If no offload plan
            # was tried, the aim becomes 0, which ends the loop.
            aimed -= min(excess, default=aimed)
            if aimed <= 0:
                break
        return without

    def _problem(self) -> OffloadProblem:
        """Build a schedule problem with times of copies; its answers also state which values are offloaded."""
        state, lowered, lowered_schedule = (
            self.state,
            self.lowered,
            self._schedules.lowered_schedule,
        )
        problem, storages = lowered_schedule.problem, state.storages
        copy, host = [-1] * len(problem), list(problem.size)
        total = sum(lowered.problem.size)
        always = {
            tagged.value.name
            for tagged in self._fitting(0, self._decisions.at_budget_one.decision.saved)
        }
        # Only a value that a run computes, and that is not needed at the end, can be off the device in between.
        # Inputs, tangents, outputs and gradients are not such values.
        stays = {*problem.to_end, *problem.at_start, *problem.at_boundary}
        for i, (name, nbytes) in enumerate(
            zip(lowered.problem.names, lowered.problem.size, strict=True)
        ):
            at, position = lowered_schedule.of_value.get(name, -1), lowered.position[i]
            if at < 0 or at in stays or name in self._left_out:
                continue
            if lowered.kind[i] is not SavedKind.VALUE or storages.owner[position] != position:
                continue
            if name not in always and (
                self.request.offload is None or nbytes * DEFAULT.offloading.small < total
            ):
                continue
            # Offloading must free exactly the bytes that saving the value takes.
            if not why_kept(state, lowered, i) and problem.size[at] == nbytes:
                copy[at] = self.request.link.time_ps(nbytes)
                host[at] = host_bytes_of(nbytes, pinned=self._is_pinned(i))
        return OffloadProblem(
            schedule_problem=problem,
            times=tuple(self._context.times.of_name.get(name, 0) for name in problem.names),
            copy_time=tuple(copy),
            host_size=tuple(host),
            host_capacity=self.host_bytes,
            always=tuple(
                at for at, time in enumerate(copy) if time >= 0 and problem.names[at] in always
            ),
        )

    def _is_pinned(self, i: int) -> bool:
        """Return whether the host's copy of an offloaded value is in page-locked memory."""
        return is_pinned(self.state.index.values[self.lowered.position[i]])

    def _scheduled(self, saved: Iterable[int]) -> tuple[Sequence[int], int]:
        """Return a decision's schedule in the node order of the passes, and the position where backward begins."""
        sequence, _, boundary = self._schedules.schedule(saved)
        return sequence, boundary

    def _candidates(
        self, peak_bytes: int, without: Candidate | None
    ) -> list[tuple[OffloadPlan, Decision | None]]:
        """Return offload plans, best first, each paired with the `Decision` of its node orders, or with None."""
        graph = self.lowered.problem
        search = OffloadSearch(self._problem(), graph, self._node_of, self._scheduled, peak_bytes)
        offload_plans = [self._best(search, without), *self._from_above(search)]
        offload_plans.sort(key=lambda c: c.rank)
        candidates = [
            self._reordered(search, c, without)
            for c in offload_plans[: DEFAULT.offloading.reordered]
        ]
        candidates += [
            (c, None) for c in offload_plans if all(c is not other for other, _ in candidates)
        ]
        return sorted(candidates, key=lambda pair: pair[0].rank)

    @property
    def _starts(self) -> list[tuple[int, ...]]:
        """The decisions from which every search for offloads starts, each as its saved nodes."""
        decisions = (
            self._decisions.cheapest,
            self._decisions.at_budget_one,
            self._context.runtime_optimal,
        )
        return [d.saved for d in decisions]

    def _best(self, search: OffloadSearch, without: Candidate | None) -> OffloadPlan:
        """Return the best offload plan that a search finds from known decisions without offloads."""
        saved = self._starts
        if without is not None and not without.decision.is_ordered:
            saved.append(without.saved)
        saved += [cut for _, cut in self._context.cuts(DEFAULT.offloading.starts)]
        return search.best(saved)

    def _from_above(self, search: OffloadSearch) -> Iterator[OffloadPlan]:
        """Yield offload plans: each offloads values of a decision above the limit on the peak, to lower the peak."""
        seen, peak_bytes = set[tuple[int, ...]](), search.capacity
        room = self.request.link.bytes_in(self._context.forward_time)
        for share in DEFAULT.offloading.above:
            above = int(share * room)
            limits = Limits(peak_bytes=peak_bytes + above)
            higher = self._schedules.seen.cheapest(limits)
            # An evaluated decision is reused, unless its peak is so low that a new search may find a cheaper one.
            if higher is None or higher.peak_bytes < peak_bytes + above // 2:
                higher = self._prices.search_within(
                    limits, self._starts, orders=self._orders.is_possible
                )
            # Values are offloaded until the peak is within the limit, as far as offloads can lower it.
            if higher.saved not in seen:
                seen.add(higher.saved)
                yield search.offload_greedily(higher.saved, *self._scheduled(higher.saved))

    def _reordered(
        self,
        search: OffloadSearch,
        offload_plan: OffloadPlan,
        without: Candidate | None,
    ) -> tuple[OffloadPlan, Decision | None]:
        """Improve an offload plan by searching node orders; return the best plan, paired with a `Decision` or None."""
        if not offload_plan.offloaded:
            return offload_plan, None
        best: tuple[OffloadPlan, Decision | None] = offload_plan, None
        starts = [offload_plan]
        if without is not None and without.schedule is not None:
            starts.append(
                search.evaluate_order(offload_plan.saved, *without.schedule, offload_plan.offloaded)
            )
        for start in starts:
            for other, decision in self._orders_from(
                search, start, DEFAULT.offloading.share if without else 1.0
            ):
                if other.rank < best[0].rank:
                    best = other, decision
        return best

    def _orders_from(
        self, search: OffloadSearch, start: OffloadPlan, share: float
    ) -> Iterator[tuple[OffloadPlan, Decision]]:
        """Yield the offload plans that searches over node orders find when they begin with the plan ``start``."""
        orders, aimed, fits = self._orders, search.capacity, False
        schedule = start.schedule.sequence, start.schedule.evaluation.boundary
        # First as if copies took no time, then with the copies of `start`. If operators still wait or the peak is exceeded,
        # two searches aim at a lower peak, which leaves room for values that are being copied.
        for index, at_once in enumerate((True, False, True, True)):
            if aimed <= 0 or (index > 1 and fits):
                return
            copies = search.copies(start, at_once=at_once)
            better = orders.improved(*schedule, aimed, copies, share=share)
            if not better:
                return
            other = search.improve_offloads(
                search.evaluate_order(start.saved, *better[0], start.offloaded)
            )
            decision = orders.decision_of(*better[0])
            if decision is not None:
                yield other, decision
                fits = fits or not (other.over or other.placement.exposed_time)
            if index:
                aimed -= max(other.peak_bytes - search.capacity, *(c.nbytes for c in copies), 1)

    # ---- from a offload plan to a decision ------------------------------------------------------------------
    def _as_candidate(
        self, offload_plan: OffloadPlan, ordered: Decision | None, peak_bytes: int
    ) -> tuple[Candidate | None, int]:
        """Return an offload plan as a candidate, with its bytes above the limit on the peak; (None, 0) if refused."""
        problem = self.lowered.problem
        named = {at: i for i, at in enumerate(self._node_of) if at >= 0}
        offloads = tuple(
            Offload(
                name=problem.names[named[v]],
                nbytes=problem.size[named[v]],
                pinned=self._is_pinned(named[v]),
            )
            for v in offload_plan.offloaded
        )
        decision = replace(ordered or self.lowered.decision(offload_plan.saved), offloads=())
        cost = offload_plan.cost - offload_plan.placement.exposed_time
        wanted = Candidate.of(self.lowered, decision, cost)
        return self._with_copies(
            self._decisions.credited(wanted, WITH_OFFLOADS), offloads, peak_bytes
        )

    def _fitting(self, host_bytes: int, saved: Container[str]) -> list[Tagged]:
        """Return the saved values, among those tagged for offloading, that together fit into the host's memory."""
        fitting, most = [], self.host_bytes
        for tagged in self._context.tagged:
            name, nbytes = tagged.value.name, tagged.value.host_bytes
            if tagged.why or name in self._left_out or name not in saved:
                continue
            # Values that must be offloaded are listed even if they do not fit: `with_tagged` raises an error for these.
            if tagged.must or most is None or host_bytes + nbytes <= most:
                fitting.append(tagged)
                host_bytes += nbytes
        return fitting

    def with_tagged(self, decided: Candidate) -> Candidate:
        """Return a decision, changed to offload the saved values that the user tags for offloading.

        Raises:
            BudgetError: the values that must be offloaded exceed the host's memory.
            PlanError: a value with the tag MUST_CPU_OFFLOAD cannot be offloaded. The message names the value and the
                reason.
        """
        if self._context.tagged and decided.decision not in self._with_tagged:
            candidate = self._offload_tagged(decided)
            self._with_tagged |= {decided.decision: candidate, candidate.decision: candidate}
        return self._with_tagged.get(decided.decision, decided)

    def _offload_tagged(self, decided: Candidate) -> Candidate:
        """Compute the result of `with_tagged`: a decision, changed to offload the saved values that the user tags."""
        before = decided.decision.offloads
        offloaded = {value.name for value in before}
        missing = set(decided.decision.saved) - offloaded
        unplaced = [replace(value, freed_after="", fetched_before="") for value in before]
        plain = replace(decided.decision, offloads=())
        wanted = Candidate.of(
            self.lowered,
            plain,
            decided.cost - decided.exposed_time,
            provenance=decided.provenance,
            limits=decided.limits,
        )
        # Each failed attempt leaves out at least one value, so the loop ends.
        candidate: Candidate | None = None
        while candidate is None:
            more = [t.value for t in self._fitting(decided.host_bytes, missing)]
            candidate = decided
            if more:
                candidate, _ = self._with_copies(
                    wanted, (*unplaced, *more), self._measures.simulated(decided)
                )
        # A value that must be offloaded and failed is an error; a preferred one stays on the device.
        names = {value.name for value in (*before, *more)}
        for tagged in self._context.tagged:
            if tagged.must and tagged.value.name in missing - names:
                raise tagged.refusal(self._left_out.get(tagged.value.name, ""))
        check_host_memory(self.host_bytes, candidate.host_bytes, f"'{self.state.joint.name}'")
        return candidate

    def _with_copies(
        self, base: Candidate, offloads: tuple[Offload, ...], peak_bytes: int
    ) -> tuple[Candidate | None, int]:
        """Schedule a decision's copies; return a candidate with its bytes above the limit on the peak, or (None, 0)."""
        decision = replace(base.decision, offloads=offloads)
        decided = replace(self.state, decision=decision, provenance=base.provenance)
        plain = PassManager(SPLIT).run(decided, in_place=True, verify=False).state
        _, refused = traced_offloads(plain, offloads)
        if refused:  # later searches do not offload these values
            self._left_out |= refused
            return None, 0
        offloaded = PassManager((OffloadSaved(),)).run(plain, in_place=True, verify=False)
        copies = Copies(offloaded.state, offloads, self.request.link, self._context.times)
        placed, exposed_time, over = copies.placed(peak_bytes)
        decision = replace(base.decision, offloads=placed)
        candidate = Candidate.of(
            self.lowered,
            decision,
            base.cost + exposed_time,
            exposed_time=exposed_time,
            provenance=base.provenance,
            limits=base.limits,
        )
        return candidate, over
