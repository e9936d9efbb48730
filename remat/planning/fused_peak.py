"""Plan within a budget on the peak of fused code: search by estimated peak.

A decision has up to three peaks. The *simulated* peak is that of the unfused graphs. The *estimated* peak is computed
from the same graphs for the fused code (`remat.graph.fused_liveness`). The *compiled* peak is that of the code that
Inductor made; it replaces the estimate once the decision was compiled.

Searches compute the simulated peak of each schedule. At each node, the unfused graphs hold more bytes than the fused
code, and the difference is similar for similar plans. So a search near one decision takes the differences of this
decision: its step problem makes each node's run take more bytes, so that its peaks are estimates plus a constant.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from remat.errors import BudgetError
from remat.graph.copying import run_of
from remat.graph.fused_liveness import FusedWalk
from remat.graph.joint import JointGraph, Role, role_of
from remat.graph.liveness import StepWalk
from remat.graph.lowering import Decision
from remat.graph.storages import Sizes
from remat.planning.candidates import Candidate
from remat.planning.peak_planner import CLOSING
from remat.planning.peak_search import PeakSearch
from remat.planning.pipelines import modules_of
from remat.planning.plan_text import learned_text
from remat.planning.planner import Planner
from remat.planning.prepared import VERTICES
from remat.units import Budget, bytes_of_share, format_bytes

#: Maximum number of searches of `aim` in the node order of the passes.
_SEARCHES = 3
#: Searches of `aim` in other node orders: maximum number from the least estimated peak, maximum number near the wanted
#: peak, maximum number in a row without a cheaper candidate, and edits of each search as a fraction of the usual number.
_FROM_LEAST, _ORDERED, _IDLE, _ORDERED_SHARE = 2, 5, 3, 0.17
#: Maximum number of searches near the least estimated peak, each of which starts from the last one's result.
_LOWEST = 2
#: Neighbouring limits from `without_gaps` differ by at most the largest limit divided by this number.
_GAP = 16
#: How often `_explore` halves the two intervals beside the best limit on saved bytes, see `beside_least`.
_HALVINGS = 2
#: With offloads, `aim_offloading` makes at most the first number of searches. It first lowers infeasible targets. A
#: step is then the least simulated peak divided by the second number.
_OFFLOADED = 5, 150
#: Compiled peaks are far above a limit if they exceed the limit by more than the limit divided by this number.
_FAR = 10
#: A search by estimated peak ends if the estimate is below the wanted peak by at most this fraction of the wanted peak.
_NEAR = 0.005
#: An estimated peak must be below the budget by the budget divided by this number; see `FusedSearch.within`.
_MARGIN = 50
#: If the estimated peak of budget 1 is above the budget, but at most this number times the budget, its step is compiled
#: first.
_PERHAPS = 1.05
#: A decision with node orders of its own must cost less than others by at least the step's cost divided by this number.
#: Its layers are less alike, so Inductor compiles more kernels: 40 instead of 26 for a Llama of four layers.
_ALIKE = 500
#: `aim` searches node orders from a candidate whose estimated peak is at most this number times the wanted peak.
_ABOVE = 1.02
#: `aim` stops if two limits of a search, one too low and one too high, differ by at most the wanted peak divided by this
#: number.
_CLOSE = 500
#: If an estimate exceeds the wanted peak, `_close_in` lowers its limit by at least the wanted peak divided by the first
#: number. After each search without a candidate within the wanted peak, `_search_orders` lowers its limit by the wanted
#: peak divided by the second number.
_LOWERED, _LOWERED_ORDERED = 1000, 100


class FusedSearch:
    """Search for decisions of one graph under a budget on the peak of fused code.

    The candidates of all searches are kept. A search after a compilation chooses among these candidates and new ones.
    A candidate is a decision with its saved bytes and cost. In this class, an *offset* is the peak of a candidate in the
    step problem of a search minus its estimated peak.

    Args:
        planner: the planner of the graph.

    Attributes:
        planner: the planner of the graph.
        found: all candidates so far.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.found: list[Candidate] = []
        #: The peak in bytes that the budget's ratio stands for; None until it is computed.
        self._limit: int | None = None

    def moved(self, planner: Planner) -> FusedSearch:
        """Return a search that uses another planner. Each compilation traces the step anew, and needs a new planner.

        If both planners have equal graphs and options, the returned search keeps the candidates found so far. Else it
        starts without candidates.
        """
        new = FusedSearch(planner)
        if planner.adopt(self.planner):
            new.found = [replace(d, lowered=planner.lowered) for d in self.found]
            new._limit = self._limit
        return new

    def within(
        self,
        budget: Budget,
        *,
        excess: int = 0,
        compiled: Mapping[Decision, int] | None = None,
        last: bool = False,
    ) -> Candidate:
        """Search for decisions, and choose the cheapest one whose peak is within a budget.

        The peak of a decision is its compiled peak if it was compiled, else its estimated peak. An estimate may
        be wrong, so the caller compiles the decision, and calls again with the compiled peak in ``compiled``. The
        decision for budget 1 saves no more than the runtime-optimal partition (the minimum cut that recomputes only
        cheap operators).

        Most estimates are off by less than 2 %. So an estimated peak counts as within the budget if it is at least 2 %
        below the budget, or near the least one; most steps then need no second plan. There are two exceptions before
        any compilation. Under a budget in bytes, the decision for budget 1 is chosen if its estimate is above the
        budget by at most 5 %. And a decision with an estimate up to the budget is chosen if it costs no more than
        budget 1, if it costs at most half of the cheapest decision that counts, or if none counts.

        A decision with node orders of its own compiles more slowly. So it is chosen only if it costs less than those
        in the node order of the passes by at least 0.2 % of the step's cost.

        If no decision is within the budget, the first of these that exists is chosen:

        1. After a compilation, the decision for budget 1, if it was not compiled and its estimated peak is below
           every compiled peak.
        2. Of the decisions that were not compiled, the one with the least estimated peak. After a compilation
           and under a budget in bytes, only decisions with estimated peaks within the budget count here.
        3. The decision with the least peak.

        ``last`` is set for the last decision that the caller compiles. Two further rules then come before those
        above; they choose among the decisions that were not compiled. If all compiled peaks exceed the budget by more
        than a tenth, estimates say little about the step, so saved bytes count instead. Under a budget in bytes:

        1. If all compiled peaks exceed the budget by more than a tenth: of the decisions with estimated peaks within
           the budget, the one that saves the fewest bytes.
        2. The decision with the least estimated peak, at any cost.

        Under a ratio:

        1. The decision for budget 1, if its estimated peak is below every compiled peak.
        2. If no decision is within the budget and all compiled peaks exceed the budget by more than a tenth: of the
           decisions with estimated peaks up to the lowest compiled peak, the one that saves the fewest bytes.

        Args:
            budget: a budget on the peak, in bytes or as a ratio.
            excess: number of bytes by which an estimated peak must be below the budget, if these are more than 2 % of
                the budget.
            compiled: the compiled peak in bytes of each compiled decision; None: nothing was compiled yet.
            last: whether the caller will compile no decision after this one.

        Returns:
            The decision. The lower bound on the cost in its ``choice`` is 0, because none is proven. Under a ratio,
            ``choice.peak_limit`` is the peak in bytes that the ratio stands for.

        Raises:
            BudgetError: the budget is in bytes, and parameters and inputs alone exceed it.
        """
        _refuse_less_than_inputs(self, budget)
        known, planner = compiled or {}, self.planner
        in_bytes, offloads = budget.peak_bytes is not None, planner.request.offload is not None
        limit = budget.peak_bytes if in_bytes else self._limit
        # The last decision under a budget in bytes is the one with the least estimated peak. `aim` looks only for
        # decisions near the budget, so it would not find that decision.
        near = not offloads and not (last and in_bytes)
        found, margin, full = False, 0, planner.with_tagged(planner.allowed_full)
        if in_bytes and limit and not known and limit < planner.expected(full) <= _PERHAPS * limit:
            # The estimate may be too high. Only the compiled step shows whether it fits without further recomputation.
            self.found.append(full)
            return replace(full, choice=replace(full.choice, recompute_bound=0))
        if limit is not None:
            margin = max(excess, limit // _MARGIN)
            if near and known.keys() <= {full.decision}:  # no search was made yet
                self.try_around(planner.allowed_vertices(VERTICES), limit - margin)
            found = near and self.aim(limit - margin, known)
        if not found:
            least, most = self._explore()
            if limit is None:
                limit = least + bytes_of_share(budget.peak_share or 0.0, max(0, most - least))
                self._limit = limit
            margin = max(excess, min(limit // _MARGIN, limit - least))
            if near:
                self.aim(limit - margin, known)
            elif offloads:
                self.aim_offloading(limit - margin)
        assert limit is not None
        best = _best(self, known, budget, limit, margin, last)
        # No lower bound is proven for peaks of fused code.
        choice = replace(best.choice, recompute_bound=0, peak_limit=0 if in_bytes else limit)
        return replace(best, choice=choice)

    def _explore(self) -> tuple[int, int]:
        """Add candidates to `found`, with peaks from the least peak up to the peak of the decision for budget 1.

        Returns:
            The two estimated peaks, in bytes, that the ratios 0 and 1 stand for: the least one of all candidates, and
            that of the decision for budget 1. If the number of chunks of the loss was chosen, ratio 1 stands for at
            least the estimated peak of the step without chunks.
        """
        planner = self.planner
        at = self.try_saved(without_gaps(planner.allowed_vertices(VERTICES)))
        for _ in range(_HALVINGS):
            at |= self.try_saved(beside_least(at))
        self.expect(planner.allowed_full)
        most = planner.expected(planner.with_tagged(planner.full))
        if planner.ends is not None:  # ratio 1 stands for the step without chunks
            most = max(most, planner.baseline.expected_bytes)
        if planner.is_alone:
            self.expect(planner.least_peak)
        else:
            self._lower()
        return min(map(planner.expected, self.found)), most

    def _lower(self) -> None:
        """Search for decisions with estimated peaks below those of all candidates found, and add them to `found`."""
        planner = self.planner
        starts = [saved for _, saved in planner.cuts(4 * VERTICES)]
        for _ in range(_LOWEST):
            best = min(self.found, key=planner.expected)
            search, _ = self._search_near(best)
            lowest = search.lowest([best.saved, *starts], planner.most_saved)
            reached = [self.expect(planner.informed(d)) for d in filter(planner.may_save, lowest)]
            if min(reached, default=0) >= planner.expected(best):
                return

    def _search_near(self, near: Candidate) -> tuple[PeakSearch, int]:
        """Return a search whose peaks are estimated peaks plus a constant, for schedules near that of a candidate.

        Args:
            near: the candidate, whose differences between unfused graphs and fused code the search takes.

        Returns:
            The search, and the constant in bytes: the largest of these differences.
        """
        planner = self.planner
        done = planner.split_of(near)
        graphs = (*modules_of(done), done.joint.num_fwd_outputs, done.joint.memories)
        fused, unfused = FusedWalk(*graphs), StepWalk(*graphs)
        both = list(zip(unfused.alive(), fused.alive(), strict=True))
        # By name of a node, the fewest bytes by which fused code holds less when the node runs.
        less: dict[str, int] = {}
        for moment, node in unfused.running():
            name, (more, fewer) = run_of(node), both[moment]
            less[name] = min(more - fewer, less.get(name, more))
        most = max([0, *less.values()])
        step = planner.search.step.with_extra({name: most - n for name, n in less.items()})
        return PeakSearch(planner.state, planner.lowered, step), most

    def expect(self, decided: Candidate) -> int:
        """Add a candidate to `found`, with its values that are tagged for offloading offloaded.

        Returns the candidate's estimated peak in bytes.
        """
        decided = self.planner.with_tagged(decided)
        self.found.append(decided)
        return self.planner.expected(decided)

    def try_saved(self, capacities: Iterable[int]) -> dict[int, int]:
        """Add the decision at each limit on saved bytes to `found`.

        Returns a dict from each limit to the estimated peak of its decision, both in bytes.
        """
        return {nbytes: self.expect(self.planner.at(nbytes)) for nbytes in capacities}

    def try_around(self, capacities: Sequence[int], wanted: int) -> None:
        """Find the largest limit on saved bytes whose decision has an estimated peak of at most ``wanted``.

        The limits are bisected. If none that is tried is within ``wanted``, all are tried from the largest one down,
        because peaks do not always rise with saved bytes. The decision at each limit that is tried is added to `found`.

        Args:
            capacities: the limits on saved bytes, in any order.
            wanted: the highest estimated peak, in bytes.
        """
        asked = sorted(capacities)
        low, high = 0, len(asked) - 1
        while low <= high:
            middle = (low + high) // 2
            (peak,) = self.try_saved([asked[middle]]).values()
            low, high = (middle + 1, high) if peak <= wanted else (low, middle - 1)
        if not self._fits(wanted):
            for nbytes in reversed(without_gaps(asked)):
                if self.try_saved([nbytes])[nbytes] <= wanted:
                    break

    def aim(self, wanted: int, known: Mapping[Decision, int]) -> bool:
        """Search for decisions with estimated peaks just within ``wanted``, and add them to `found`.

        The first searches keep the node order of the passes. The others also search node orders: first from the
        candidate with the least estimated peak, then from one of low cost whose estimated peak may slightly exceed
        ``wanted``. If the user named another solver than ``auto``, only this solver's decisions are added.

        Args:
            wanted: the estimated peak to stay within, in bytes.
            known: the compiled peak, in bytes, of each decision that was compiled.

        Returns:
            Whether a decision that was not compiled has an estimated peak within ``wanted``.
        """
        planner = self.planner
        self.expect(planner.allowed_full)
        if wanted < input_bytes(planner.state.joint):  # nor has any estimate
            return False
        if planner.is_alone:
            self._ask_alone(wanted)
            return bool(self._fits(wanted, known))
        self._close_in(wanted)
        fits = self._fits(wanted, known)
        if all(d.cost > planner.step_cost // _ALIKE for d in fits):
            # The two starts lead to different local optima, and either may be the better one.
            least = min(self.found, key=planner.expected)
            self._search_orders(wanted, least, known, _FROM_LEAST)
            near = self._fits(_ABOVE * wanted, known)
            start = min(near, key=lambda d: d.cost, default=None) or self._nearest(wanted)
            if start is not least:
                self._search_orders(wanted, start, known, _ORDERED)
        return bool(self._fits(wanted, known))

    def _close_in(self, wanted: int) -> None:
        """Search in the node order of the passes until an estimated peak is just within ``wanted``; add all candidates.

        Each search has a limit on the peak in its step problem. The first limit is ``wanted`` plus the constant of the
        search. Each later limit is moved by the room that the last candidate leaves.
        """
        planner, last = self.planner, self._nearest(wanted)
        search, offset = self._search_near(last)
        starts = [d.saved for d in self.found if d.ordered is None]
        aim = wanted + offset
        # `low`: the highest limit whose candidate was within `wanted`; `high`: the lowest one whose candidate was not.
        low, high = 0, math.inf
        for _ in range(_SEARCHES):
            found = search.within(aim, starts, planner.most_saved)
            if not planner.may_save(found):
                return
            peak, found = found.peak_bytes, planner.informed(found)
            room, same, last = wanted - self.expect(found), found.decision == last.decision, found
            if 0 <= room <= _NEAR * wanted or (room > 0 and not last.cost):
                return
            if room < 0:
                # A search within this candidate's peak may find the candidate again.
                high = min(high, aim, max(low + 1, peak))
                moved = min(aim + min(room, -(wanted // _LOWERED)), peak - 1)
            else:
                low, moved = max(low, aim), aim + room
            if high - low <= wanted // _CLOSE:
                return
            # Estimates jump where operators stop fusing. So a limit that is not between `low` and `high` is replaced by
            # their midpoint.
            again = same and room > 0 and high < math.inf
            aim = moved if low < moved < high and not again else (low + int(high)) // 2

    def _search_orders(
        self, wanted: int, start: Candidate, known: Mapping[Decision, int], searches: int
    ) -> None:
        """Search node orders for cheaper candidates with estimated peaks within ``wanted``, and add them to `found`.

        The first search starts from ``start``. Each later one starts from the cheapest candidate that these searches
        found with an estimate of at most `_ABOVE` times ``wanted``. Its limit is ``wanted`` plus the mean difference
        between the peaks in the step problem and the estimated peaks of these candidates. The limit falls with each
        search in a row that finds no candidate within ``wanted``.

        Args:
            wanted: the estimated peak to stay within, in bytes.
            start: the candidate that the first search starts from.
            known: the compiled peak, in bytes, of each decision that was compiled. These decisions do not count.
            searches: maximum number of searches.
        """
        planner = self.planner
        search, offset = self._search_near(start)
        own, offsets = {start.decision}, list[int]()
        misses = idle = 0

        def cheapest() -> float:
            return min((d.cost for d in self._fits(wanted, known)), default=math.inf)

        least = cheapest()
        for _ in range(searches):
            seen = {d.decision for d in self.found}
            aim = wanted + offset - misses * (wanted // _LOWERED_ORDERED)
            made = filter(planner.may_save, search.reordered(start, aim, share=_ORDERED_SHARE))
            new = [d for d in made if d.decision not in seen and d.schedule != start.schedule]
            own |= {d.decision for d in new}
            reached = [self.expect(planner.informed(d)) for d in new]
            offsets += [d.peak_bytes - peak for d, peak in zip(new, reached, strict=True)]
            before, least = least, cheapest()
            idle = 0 if least < before else idle + 1
            misses = 0 if any(peak <= wanted for peak in reached) else misses + 1
            if not least or idle == _IDLE:
                return
            offset = sum(offsets) // len(offsets) if offsets else offset
            near = [d for d in self._fits(_ABOVE * wanted, known) if d.decision in own]
            start = min(near or new or [start], key=lambda d: d.cost)

    def _ask_alone(self, wanted: int) -> None:
        """Add to `found` decisions with estimated peaks just within ``wanted`` that the user's solver makes."""
        planner = self.planner
        low = max((d.saved_bytes for d in self._fits(wanted)), default=planner.least_bytes)
        above = (d.saved_bytes for d in self.found if d.saved_bytes > low)
        high = min(above, default=planner.full_bytes)
        self.found += planner.bisected(low, high, wanted, CLOSING, planner.expected)
        if "schedule" not in planner.request.solver.solves:
            return
        search, offset = self._search_near(self._nearest(wanted))
        found = planner.scheduled(wanted + offset, search)
        if found is not None:
            self.expect(found)

    def _fits(self, peak_bytes: float, known: Container[Decision] = ()) -> list[Candidate]:
        """Return the candidates found with an estimated peak of at most ``peak_bytes``, without those in ``known``."""
        expected = self.planner.expected
        return [d for d in self.found if d.decision not in known and expected(d) <= peak_bytes]

    def _nearest(self, wanted: int) -> Candidate:
        """Return the candidate found with the estimated peak nearest to ``wanted``."""
        return min(self.found, key=lambda d: abs(self.planner.expected(d) - wanted))

    def aim_offloading(self, wanted: int) -> None:
        """Search for decisions near an estimated peak that may offload values, and add them to `found`.

        Each search has a limit on the simulated peak. The first limit is ``wanted`` plus the difference of the two peaks
        for the decision with the least simulated peak and no offloads. Limits below that peak may be infeasible. Then
        limits slightly below the peak are tried, and after an infeasible one, limits slightly above.

        Args:
            wanted: the estimated peak to stay within, in bytes.
        """
        planner = self.planner
        lowest = planner.within_peak(Budget(peak_share=0.0), offload=False)
        feasible = planner.peak(lowest)
        searches, step = _OFFLOADED[0], -(feasible // _OFFLOADED[1])
        aim = wanted + feasible - self.expect(lowest)
        for _ in range(searches):
            if aim < feasible:
                feasible += step
                aim = feasible
            try:
                decided = planner.decide(Budget(peak_bytes=aim))
            except BudgetError:
                # The target is infeasible even with offloads, so all further targets are above the least peak.
                aim, step = 0, abs(step)
                continue
            room = wanted - self.expect(decided)
            if 0 <= room <= _NEAR * wanted or (room > 0 and not decided.cost):
                break
            aim += room


def without_gaps(vertices: Sequence[int]) -> list[int]:
    """Return limits on saved bytes to try: the given ones and, in large intervals between them, evenly spaced ones.

    Args:
        vertices: the given limits, in bytes: saved bytes at vertices of `Prepared.hull`.
    """
    found, most = set(vertices), max(1, max(vertices) // _GAP)
    for a, b in pairwise(sorted(vertices)):
        parts = -(-(b - a) // most)
        found |= {a + (b - a) * k // parts for k in range(1, parts)}
    return sorted(found)


def beside_least(at: Mapping[int, int]) -> list[int]:
    """Return new limits on saved bytes to try: the midpoints between the best limit and its two neighbours.

    The best limit is the one whose decision has the least estimated peak.

    Args:
        at: for each limit on saved bytes that was tried, the estimated peak of its decision in bytes.
    """
    asked = sorted(at)
    k = min(range(len(asked)), key=lambda i: at[asked[i]])
    return [(a + b) // 2 for a, b in pairwise(asked[max(0, k - 1) : k + 2])]


def input_bytes(joint: JointGraph) -> int:
    """Return the bytes of a captured step's parameters, buffers and inputs, which are alive throughout the step."""
    inputs = [n for n in joint.graph.find_nodes(op="placeholder") if role_of(n) is Role.PRIMAL]
    return sum(Sizes(joint.memories).of_all(inputs).values())


def _refuse_less_than_inputs(search: FusedSearch, budget: Budget) -> None:
    """Raise a BudgetError if a budget on the peak is in bytes and below the bytes of parameters and inputs.

    The message names the least estimated peak, so the error costs one search.
    """
    given = input_bytes(search.planner.state.joint)
    if budget.peak_bytes is not None and budget.peak_bytes < given:
        least, _ = search._explore()
        raise BudgetError(
            f"budget is a peak of {format_bytes(budget.peak_bytes)} ({budget.peak_bytes} bytes), which is infeasible: "
            f"parameters and inputs alone take {format_bytes(given)} ({given} bytes). The least peak of any plan found is "
            f"about {format_bytes(least)} ({least} bytes), estimated under Inductor; budget=remat.Peak(0.0) runs that plan"
            + learned_text(search.planner.state.index.nodes)
        )


def _best(
    search: FusedSearch,
    known: Mapping[Decision, int],
    budget: Budget,
    limit: int,
    margin: int,
    last: bool,
) -> Candidate:
    """Choose one of the candidates found, by the rules of `FusedSearch.within`.

    Args:
        search: the search, which holds the candidates.
        known: the compiled peak in bytes of each compiled decision.
        budget: the requested budget.
        limit: the peak in bytes that the budget stands for.
        margin: number of bytes by which an estimated peak must be below ``limit`` to count as within the budget.
        last: whether the caller will compile no decision after this one.
    """
    planner, found = search.planner, search.found
    expected, full = planner.expected, planner.with_tagged(planner.allowed_full)
    new = [d for d in found if d.decision not in known]
    lowest = min(known.values(), default=0)
    unlike: list[Candidate] = []
    if last and lowest > limit + limit // _FAR:
        # Estimates say little about this step, so prefer the decision that differs most from compiled ones.
        below = limit if budget.peak_bytes else lowest
        unlike = [d for d in new if expected(d) <= below]
    if last and new and budget.peak_bytes and not unlike:
        return min(new, key=expected)

    def taken(decided: Candidate) -> int:
        return known.get(decided.decision, expected(decided))

    fits = [d for d in new if expected(d) + margin <= limit]
    if not known:
        # A plan that may have to be replaced is worth it if it costs half of one that most likely fits.
        most = max(full.cost, min((d.cost for d in fits), default=math.inf) / 2)
        fits = [d for d in new if d.cost <= most and expected(d) <= limit] or fits
    fits += [d for d in found if known.get(d.decision, limit + 1) <= limit]
    if known and (last or not fits):
        fits = [d for d in new if d is full and expected(d) < lowest] or fits
    if unlike and (budget.peak_bytes or not fits):
        return min(unlike, key=lambda d: d.saved_bytes)
    if fits:
        more = planner.step_cost // _ALIKE
        return min(fits, key=lambda d: (d.cost + more * (d.schedule is not None), taken(d)))
    if known and budget.peak_bytes:
        # Compiling a decision takes long, so a decision whose estimate exceeds the budget is not chosen.
        new = [d for d in new if expected(d) <= limit]
        found = [d for d in found if d.decision in known] or found
    return min(new or found, key=taken)
