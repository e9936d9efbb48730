"""Decide which values to save, recompute or offload within a peak."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from remat.errors import BudgetError
from remat.graph.lowering import Decision, Offload
from remat.passes.hooks.offload_saved import OffloadSaved, traced_offloads
from remat.planning.candidates import Candidate
from remat.planning.offload_copies import Copies
from remat.planning.offload_costs import Tagged, Times, offload_problem
from remat.planning.peak_bound import PeakBounds
from remat.planning.peak_search import PeakSearch
from remat.planning.pipelines import PassManager
from remat.planning.prepared import Prepared
from remat.solvers.offload_prices import Lives, OffloadChoice
from remat.solvers.offload_search import OffloadSearch
from remat.units import format_bytes

#: Most rounds of a search. Each leaves out values that cannot be offloaded, or lowers the target by the last excess.
_TURNS = 4
#: Vertices of the hull from which a search starts, about.
_CUTS = 4
#: Ratio of the usual number of edits in a search over node orders, if a plan without offloads is known.
_ORDER_SHARE = 0.5
#: A search may start from a plan above the peak: by these ratios of the bytes that the link sends during forward.
_ABOVE = (0.9, 0.6)
#: Decisions with offloads for which node orders are searched.
_REORDERED = 2
#: Most decisions of a round whose copies are placed, if each of them turns out to exceed the peak.
_PLACED = 3


class OffloadPlanner:
    """Planner that decides one prepared graph within a peak, and may offload values over the request's link.

    Args:
        decider: planner of the graph without offloads.
        search: search for decisions without offloads, by the peaks of their schedules.
        bounds: lower bounds on the cost of decisions without offloads.
        tagged: the values that the user tags for offloading.
    """

    def __init__(
        self,
        decider: Prepared,
        search: PeakSearch,
        bounds: PeakBounds,
        tagged: Sequence[Tagged] = (),
    ) -> None:
        self._of, self._search, self._bounds = decider, search, bounds
        self._link, self._tagged = decider.request.link, tagged
        #: Reasons why values cannot be offloaded, by name.
        self._left_out: dict[str, str] = {}

    @cached_property
    def _times(self) -> Times:
        """Run times of the graph's operators."""
        return Times.of(self._of.state, self._of.request.cost)

    @cached_property
    def _node_of(self) -> list[int]:
        """For each node of the graph problem, the node of the step problem that computes its value.

        -1 if the value cannot be saved, takes no bytes, or is not computed by a single node of the step problem.
        """
        of_value, problem = self._search.step.of_value, self._of.lowered.problem
        return [
            of_value.get(name, -1) if size and save else -1
            for name, size, save in zip(problem.names, problem.size, problem.savable, strict=True)
        ]

    def within(self, peak_bytes: int, without: Candidate | None) -> Candidate | None:
        """Return the cheapest decision found within a simulated peak.

        Args:
            peak_bytes: limit on the peak of the device's memory, in bytes.
            without: the best decision without offloads; None if no such decision is within the peak.

        Returns:
            A decision with offloads that is cheaper than ``without``. If none was found, ``without``, which may be
            None.
        """
        if without is not None and not without.cost:
            return without
        self._of.on_step("searching for values to offload")
        aimed = peak_bytes
        for _ in range(_TURNS):
            most, excess = math.inf if without is None else without.cost, []
            for choice, decision in self._candidates(aimed, without):
                if not choice.offloaded or choice.over or choice.cost >= most:
                    continue
                decided, over = self._placed(choice, decision, peak_bytes)
                if decided is not None and not over:
                    over = max(0, self._of.peak(decided) - peak_bytes)
                    if not over and decided.cost < most:
                        return decided
                excess.append(over)
                if len(excess) == _PLACED:
                    break
            # Passes may need more memory than the search assumed. Without any candidate, the target becomes 0.
            aimed -= min(excess, default=aimed)
            if aimed <= 0:
                break
        return without

    def search_within(self, peak_bytes: int) -> OffloadSearch:
        """Create the search for decisions with offloads within a peak."""
        problem = offload_problem(
            self._of.state,
            self._of.lowered,
            self._search.step,
            self._times,
            self._link,
            self._left_out,
            {tagged.value.name for tagged in self._fitting(0, self._of.full.decision.saved)},
            self._of.host_bytes,
            only_always=self._of.request.offload is None,
        )
        return OffloadSearch(
            problem,
            self._of.lowered.problem,
            self._node_of,
            self._search.schedule,
            self._lives,
            peak_bytes,
        )

    def _candidates(
        self, peak_bytes: int, without: Candidate | None
    ) -> list[tuple[OffloadChoice, Decision | None]]:
        """Return choices of saved and offloaded values, the best first.

        Args:
            peak_bytes: limit on the peak, in bytes.
            without: the best decision without offloads; None if there is none.

        Returns:
            Pairs of a choice, and the `Decision` with the node orders of the choice. The second item is None if
            the passes order the nodes.
        """
        search = self.search_within(peak_bytes)
        begun = [self._best(search, without), *self._from_above(search, peak_bytes)]
        begun.sort(key=lambda c: c.rank)
        candidates = [self._reordered(search, c, peak_bytes, without) for c in begun[:_REORDERED]]
        candidates += [(c, None) for c in begun if all(c is not other for other, _ in candidates)]
        return sorted(candidates, key=lambda pair: pair[0].rank)

    def _best(self, search: OffloadSearch, without: Candidate | None) -> OffloadChoice:
        """Return the best choice of saved and offloaded values, searched from known decisions without offloads.

        Args:
            search: the search for decisions with offloads.
            without: the best decision without offloads, which is one of the starts; None if there is none.
        """
        of = self._of
        starts = [of.cheapest, of.full, of.runtime_optimal]
        saved = [d.saved for d in starts]
        if without is not None and not without.decision.is_ordered:
            saved.append(without.saved)
        saved += [cut for _, cut in of.cuts(_CUTS)]
        return search.best(saved)

    def _from_above(self, search: OffloadSearch, peak_bytes: int) -> Iterator[OffloadChoice]:
        """Yield choices of saved and offloaded values, made from decisions whose peak is above the limit.

        Values of such a decision are offloaded until its peak is within the limit, as far as possible.

        Args:
            search: chooses the values to offload.
            peak_bytes: limit on the peak, in bytes.
        """
        of, seen = self._of, set[tuple[int, ...]]()
        room = self._link.bytes_in(self._forward_time)
        for share in _ABOVE:
            above = int(share * room)
            higher = self._search.seen_within(peak_bytes + above)
            # An evaluated decision is reused unless its peak is much lower than allowed here.
            if higher is None or higher.peak_bytes < peak_bytes + above // 2:
                starts = [d.saved for d in (of.cheapest, of.full, of.runtime_optimal)]
                higher = self._search.within(peak_bytes + above, starts)
            if higher.saved not in seen:
                seen.add(higher.saved)
                sequence, _, boundary = self._search.schedule(higher.saved)
                yield search.sent(higher.saved, sequence, boundary)

    @cached_property
    def _forward_time(self) -> int:
        """Summed time in ps of all operators that depend on no tangent, each run once."""
        late = self._of.state.roles.tangent_closure
        nodes = zip(self._of.state.index.nodes, late, strict=True)
        return sum(self._times.of_name[node.name] for node, is_late in nodes if not is_late)

    def _reordered(
        self,
        search: OffloadSearch,
        choice: OffloadChoice,
        peak_bytes: int,
        without: Candidate | None,
    ) -> tuple[OffloadChoice, Decision | None]:
        """Search for a better node order with the offloads of a choice.

        Searches start from the schedule of ``choice``, and from the schedule of ``without`` if it has one.

        Args:
            search: evaluates choices.
            choice: the choice whose offloads are kept.
            peak_bytes: limit on the peak, in bytes.
            without: the best decision without offloads; None if there is none.

        Returns:
            The best choice found, and the `Decision` with its node orders. If no found one is better, ``choice``
            and None.
        """
        if not choice.offloaded:
            return choice, None
        best: tuple[OffloadChoice, Decision | None] = choice, None
        starts = [choice]
        if without is not None and without.schedule is not None:
            starts.append(search.on(choice.saved, *without.schedule, choice.offloaded))
        for start in starts:
            for other, decision in self._orders_from(
                search, start, peak_bytes, _ORDER_SHARE if without else 1.0
            ):
                if other.rank < best[0].rank:
                    best = other, decision
        return best

    def _orders_from(
        self, search: OffloadSearch, start: OffloadChoice, peak_bytes: int, share: float
    ) -> Iterator[tuple[OffloadChoice, Decision]]:
        """Yield choices with the offloads of ``start`` and other node orders, found by searches over node orders.

        The first search assumes that copies take no time, and the second keeps the copies where ``start`` has
        them. If both results exceed the peak or make operators wait for copies, up to two searches follow. They
        keep a lower peak, which leaves room for values that are being copied.

        Args:
            search: evaluates choices.
            start: the choice to start from.
            peak_bytes: limit on the peak, in bytes.
            share: number of edits of the schedule to try, as a ratio of the usual number.

        Yields:
            A choice, and the `Decision` with its node orders.
        """
        orders, aimed, fits = self._search.orders, peak_bytes, False
        own = start.schedule.sequence, start.schedule.boundary
        for turn, at_once in enumerate((True, False, True, True)):
            if aimed <= 0 or (turn > 1 and fits):
                return
            copies = search.copies(start, at_once=at_once)
            better = orders.improved(*own, aimed, copies, share=share)
            if better is None:
                return
            other = search.settled(search.on(start.saved, *better, start.offloaded))
            decision = orders.decision_of(*better)
            if decision is not None:
                yield other, decision
                fits = fits or not (other.over or other.exposed)
            if turn:
                aimed -= max(other.peak_bytes - peak_bytes, *(c.nbytes for c in copies), 1)

    @cached_property
    def _lives(self) -> Lives:
        """Lifetimes of the graph problem's values.

        For each node, the positions in the joint graph of its definition, its last use in forward, and its first
        and last use in backward.
        """
        begin, first, last = self._search.uses
        state, lowered = self._of.state, self._of.lowered
        index, owner, required = state.index, state.storages.owner, state.roles.required_forward
        runs = self._search.step.of_name
        ready = [-1] * len(index)
        for i in range(len(index) - 1, -1, -1):
            if required[i] and index.nodes[i].name in runs:
                for j in (i, *index.inputs[i]):
                    ready[j] = max(ready[j], i)
            # A use of a view is a use of its base, too.
            for j in index.inputs[i]:
                if owner[i] == owner[j]:
                    ready[j] = max(ready[j], ready[i])
        for i in range(len(index)):
            ready[owner[i]] = max(ready[owner[i]], ready[i])
        return Lives(
            begin=begin, ready=[ready[p] for p in lowered.position], first=first, last=last
        )

    def bound(self, peak_bytes: int, moments: Iterable[int]) -> int:
        """Return a lower bound on the cost of every decision with offloads within a peak, for any node order.

        Values that are in the host's memory while backward runs were sent during forward. Forward takes at most
        the time of its operators plus the cost T that a decision adds. So the decision offloads at most the
        bytes that the link sends in that time, and no more than the host's memory holds. T is at least the bound without offloads, within a peak that is
        higher by these bytes. The result is the least T for which this holds.

        Args:
            peak_bytes: limit on the peak, in bytes.
            moments: positions in the joint graph of nodes that backward runs under every decision. The bound
                without offloads is computed from the bytes alive while each of them runs.
        """
        at_moments, forward = tuple(moments), self._forward_time

        def least(added: int) -> int:
            # `bytes_in` rounds down, which would make the bound too high.
            sent = self._link.bytes_in(forward + added) + 1
            if self._of.host_bytes is not None:
                sent = min(sent, self._of.host_bytes)
            return self._bounds.bound(peak_bytes + sent, at_moments)

        # A decision that adds less than `low` would have to cost more than it adds, so there is none.
        low, high = 0, least(0)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if least(middle) > middle else (low, middle)
        return low

    # ---- from a choice to a decision ------------------------------------------------------------------
    def _placed(
        self, found: OffloadChoice, ordered: Decision | None, peak_bytes: int
    ) -> tuple[Candidate | None, int]:
        """Convert a choice to a candidate, with places for the copies of its offloaded values.

        Args:
            found: the choice of saved and offloaded values.
            ordered: the decision with the node orders of the choice; None if the passes order the nodes.
            peak_bytes: limit on the peak, in bytes.

        Returns:
            The candidate and its bytes above the peak. None and 0 if one of the values cannot be offloaded;
            later searches do not offload such values.
        """
        of, problem = self._of, self._of.lowered.problem
        named = {at: i for i, at in enumerate(self._node_of) if at >= 0}
        offloads = tuple(
            Offload(name=problem.names[named[v]], nbytes=problem.size[named[v]])
            for v in found.offloaded
        )
        decision = replace(ordered or of.lowered.decision(found.saved), offloads=())
        wanted = Candidate.of(of.lowered, decision, found.cost - found.exposed)
        choice = replace(
            of.choice(max(of.full_bytes, wanted.saved_bytes)),
            solver=of.deciding.asked().name,
            items=len(problem),
        )
        return self._carried_out(replace(wanted, choice=choice), offloads, peak_bytes)

    def _fitting(self, host_bytes: int, saved: Container[str]) -> list[Tagged]:
        """Return the tagged values that can be offloaded within the host's memory.

        Values that must be offloaded are all returned; `with_tagged` refuses them if they exceed the memory.

        Args:
            host_bytes: bytes that other values take there.
            saved: names of the values that count.
        """
        found, most = [], self._of.host_bytes
        for tagged in self._tagged:
            name, nbytes = tagged.value.name, tagged.value.nbytes
            if tagged.why or name in self._left_out or name not in saved:
                continue
            if tagged.must or most is None or host_bytes + nbytes <= most:
                found.append(tagged)
                host_bytes += nbytes
        return found

    def with_tagged(self, decided: Candidate, peak_bytes: int) -> Candidate:
        """Return a decision that also offloads its saved values that the user tags for offloading.

        Tagged values that cannot be offloaded stay saved. If none remains, ``decided`` is returned unchanged.

        Args:
            decided: a decision within the peak.
            peak_bytes: limit on the peak, in bytes.

        Raises:
            BudgetError: the values that must be offloaded exceed the host's memory.
            PlanError: a value that must be offloaded cannot be; the message names the value and the reason.
        """
        of, before = self._of, decided.decision.offloads
        offloaded = {value.name for value in before}
        missing = set(decided.decision.saved) - offloaded
        unplaced = [replace(value, freed_after="", fetched_before="") for value in before]
        plain = replace(decided.decision, offloads=())
        wanted = Candidate.of(
            of.lowered, plain, decided.cost - decided.choice.exposed_time, decided.choice
        )
        # Each failed attempt leaves out at least one value, so the loop ends.
        found: Candidate | None = None
        while found is None:
            more = [t.value for t in self._fitting(decided.host_bytes, missing)]
            found = decided
            if more:
                found, _ = self._carried_out(wanted, (*unplaced, *more), peak_bytes)
        names = {value.name for value in (*before, *more)}
        for tagged in self._tagged:
            if tagged.must and tagged.value.name in missing - names:
                raise tagged.refusal(self._left_out.get(tagged.value.name, ""))
        if of.host_bytes is not None and found.host_bytes > of.host_bytes:
            raise BudgetError(
                f"host_memory is {format_bytes(of.host_bytes)} ({of.host_bytes} bytes), and the values of "
                f"'{of.state.joint.name}' that must be offloaded take {format_bytes(found.host_bytes)}; raise it to "
                f"{found.host_bytes}, or tag fewer"
            )
        return found

    def _carried_out(
        self, wanted: Candidate, offloads: tuple[Offload, ...], peak_bytes: int
    ) -> tuple[Candidate | None, int]:
        """Split the graph by a decision with offloads, and choose places for the copies within a peak.

        Args:
            wanted: the decision without offloads.
            offloads: the values to offload, of those that the decision saves.
            peak_bytes: limit on the peak, in bytes.

        Returns:
            The candidate and its bytes above the peak. None and 0 if one of the values cannot be offloaded;
            later searches do not offload such values.
        """
        of, plain = self._of, self._of.split(wanted)
        _, refused = traced_offloads(plain, offloads)
        if refused:
            self._left_out |= refused
            return None, 0
        decision = replace(wanted.decision, offloads=offloads)
        done = PassManager((OffloadSaved(),)).run(
            replace(plain, decision=decision), in_place=True, verify=False
        )
        copies = Copies(done.state, offloads, self._link, self._times)
        placed, exposed_time, over = copies.placed(peak_bytes)
        choice = replace(wanted.choice, exposed_time=exposed_time)
        decision = replace(wanted.decision, offloads=placed)
        return Candidate.of(of.lowered, decision, wanted.cost + exposed_time, choice), over
