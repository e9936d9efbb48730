"""Plan within a budget on the peak of fused code: search by simulated peak, guided by the estimated peak.

Searches and proofs use the simulated peak of the unfused graphs. The estimated peak of the fused code
(`remat.graph.fused_liveness`) differs from the simulated one by a similar offset for similar plans. So the search is
repeated, with its target shifted by the offset of the last plan. If node orders can be searched, a repetition is a
short search from the last schedule. If the step of a decision was compiled, its compiled peak replaces the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from remat.errors import BudgetError
from remat.graph.joint import JointGraph, Role, role_of
from remat.graph.lowering import Decision
from remat.graph.storages import Sizes
from remat.planning.candidates import Candidate
from remat.planning.planner import Planner
from remat.planning.prepared import VERTICES
from remat.units import Budget, bytes_of_share, format_bytes

#: Maximum number of searches of `aim_above` without offloads, and of `aim` after a compilation.
_SEARCHES = 4
#: Neighbouring limits on saved bytes differ by at most the largest limit divided by this number.
_GAP = 16
#: How often the two intervals beside the best limit on saved bytes are halved.
_HALVINGS = 2
#: A target that is too low is raised by the least simulated peak divided by this number.
_STEP = 100
#: With offloads: maximum number of searches of `aim_above`; and a divisor, by which the least simulated peak is divided
#: to get the step by which a target is lowered.
_OFFLOADED = 5, 150
#: Compiled peaks are far above a limit if they exceed it by more than the limit divided by this number.
_FAR = 10
#: A plan is near enough if the unused fraction of the wanted peak is at most this.
_NEAR = 0.005
#: Maximum number of searches of `aim` before any compilation; and the number of edits in a search from the last
#: schedule, as a ratio of the usual number.
_REFINED, _REFINED_SHARE = 6, 0.5
#: A target that was missed is lowered by at least the wanted peak divided by this number.
_LOWERED = 1000


class FusedSearch:
    """Search for decisions of one graph under a budget on the peak of fused code.

    The candidates of all searches are kept. A search after a compilation continues from these candidates.

    Args:
        planner: the planner of the graph.

    Attributes:
        planner: the planner of the graph.
        found: all candidates so far, as decisions with their saved bytes and cost.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.found: list[Candidate] = []
        #: The peak in bytes that the budget's ratio stands for; None until it is computed.
        self._limit: int | None = None

    def moved(self, planner: Planner) -> FusedSearch:
        """Return a search that uses another planner, because each compilation traces the step anew.

        If the planner has an equal graph and equal options, the returned search keeps the candidates found so far;
        else it starts without candidates.
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
        """Choose the cheapest decision found whose peak is within a budget.

        The peak of a decision is its compiled peak if it was compiled, else its estimated peak. An estimate may
        be wrong, so the caller compiles the decision and calls again with the compiled peak. "The plan for budget
        1" is the decision for budget 1, which saves no more than the runtime-optimal partition. If no decision
        is within the budget, the first of these that exists is chosen:

        1. After a compilation, the plan for budget 1, if it was not compiled and its estimated peak is below
           every compiled peak.
        2. Of the decisions that were not compiled, the one with the least estimated peak. After a compilation
           and under a budget in bytes, only estimates within the budget count here.
        3. The decision with the least peak.

        With ``last``, other rules come first; if none of them applies, the rules above follow. They choose among
        the decisions that were not compiled. If all compiled peaks exceed the budget by more than a tenth,
        estimates say little about the step, so saved bytes count instead. Under a budget in bytes:

        1. If all compiled peaks exceed the budget by more than a tenth, the decision that saves the fewest bytes.
           Only estimated peaks within the budget count here.
        2. The decision with the least estimated peak, at any cost.

        Under a ratio:

        1. The plan for budget 1, if its estimated peak is below every compiled peak.
        2. If no decision is within the budget and all compiled peaks exceed it by more than a tenth, the decision
           that saves the fewest bytes. Only estimated peaks up to the lowest compiled peak count here.

        Args:
            budget: a budget on the peak, in bytes or as a ratio.
            excess: bytes by which an estimated peak must at least be below the budget.
            compiled: the compiled peak in bytes of each compiled decision; None: nothing was compiled yet.
            last: whether the caller will compile no decision after this one.

        Returns:
            The decision. The lower bound on the cost in its ``choice`` is 0, because none is proven. Under a ratio,
            ``choice.peak_limit`` is the peak in bytes that the ratio stands for.

        Raises:
            BudgetError: the budget is in bytes, and parameters and inputs alone exceed it.
        """
        _refuse_less_than_inputs(self.planner, budget)
        known, planner = compiled or {}, self.planner
        in_bytes = budget.peak_bytes is not None
        limit = budget.peak_bytes if in_bytes else self._limit
        # The last plan within a peak in bytes is the lowest one. A search near the peak does not find that plan.
        near = planner.request.offload is None and not (last and in_bytes)
        found = False
        if limit is not None and near:
            if not known:
                self.try_around(planner.allowed_vertices(VERTICES), limit - excess)
            found = self.aim(limit - excess, known)
        if not found:
            lowest, off, ends = self._explore()
            if limit is None:
                least, most = ends
                limit = least + bytes_of_share(budget.peak_share or 0.0, max(0, most - least))
                self._limit = limit
                found = near and self.aim(limit - excess, known)
            if not found:
                self.aim_above(lowest, off, limit - excess)
        assert limit is not None
        best = _best(self, known, budget, limit, excess, last)
        # No lower bound is proven for peaks of fused code.
        choice = replace(best.choice, recompute_bound=0, peak_limit=0 if in_bytes else limit)
        return replace(best, choice=choice)

    def _explore(self) -> tuple[Candidate, int, tuple[int, int]]:
        """Add candidates to `found`, from the least peak to that of the plan for budget 1.

        Returns:
            Three items: the candidate with the least simulated peak; the simulated minus the estimated peak of
            this candidate, in bytes; and two estimated peaks, in bytes: the least one of all candidates, and
            that of the plan for budget 1, which saves no more than the runtime-optimal partition.
        """
        planner = self.planner
        at = self.try_saved(without_gaps(planner.allowed_vertices(VERTICES)))
        for _ in range(_HALVINGS):
            at |= self.try_saved(beside_least(at))
        most = self.expect(planner.full)
        if planner.ends is not None:  # ratio 1 is the step without chunks
            most = max(most, planner.baseline.expected_bytes)
        lowest = planner.within_peak(
            Budget(peak_share=0.0), offload=False
        )  # ratios count from here
        off = planner.peak(lowest) - self.expect(lowest)
        return lowest, off, (min(map(planner.expected, self.found)), most)

    def expect(self, decided: Candidate) -> int:
        """Add a candidate, with its tagged values offloaded, to `found`; return the estimated peak in bytes."""
        decided = self.planner.with_tagged(decided)
        self.found.append(decided)
        return self.planner.expected(decided)

    def try_saved(self, capacities: Iterable[int]) -> dict[int, int]:
        """Add the decision at each limit on saved bytes to `found`; return estimated peaks in bytes by limit."""
        return {nbytes: self.expect(self.planner.at(nbytes)) for nbytes in capacities}

    def try_around(self, capacities: Sequence[int], wanted: int) -> None:
        """Bisect for the largest limit on saved bytes that keeps an estimated peak; add each decision to `found`.

        Args:
            capacities: the limits on saved bytes, in any order.
            wanted: the estimated peak to keep, in bytes.
        """
        asked = sorted(capacities)
        low, high = 0, len(asked) - 1
        while low <= high:
            middle = (low + high) // 2
            (peak,) = self.try_saved([asked[middle]]).values()
            low, high = (middle + 1, high) if peak <= wanted else (low, middle - 1)

    def aim(self, wanted: int, known: Mapping[Decision, int]) -> bool:
        """Search for decisions with estimated peaks just within ``wanted``, and add them to `found`.

        Each search keeps a limit on the simulated peak, because estimated peaks cannot be searched directly. The
        offset of a candidate is its simulated minus its estimated peak. The first limit is ``wanted`` plus the
        offset of the candidate whose estimated peak is nearest to ``wanted``.

        Args:
            wanted: the estimated peak to stay within, in bytes.
            known: the compiled peak, in bytes, of each decision that was compiled.

        Returns:
            Whether the searches found a decision that was not compiled and has an estimated peak within
            ``wanted``.
        """
        planner = self.planner
        self.expect(planner.allowed_full)
        nearest = min(self.found, key=lambda d: abs(planner.expected(d) - wanted))
        aim = wanted + planner.peak(nearest) - planner.expected(nearest)
        last, fits = None, False
        # The highest aim whose candidate fits, and the lowest one whose candidate does not.
        low, high = 0, math.inf
        for _ in range(_SEARCHES if known else _REFINED):
            # After a compilation each search starts afresh: short searches drift to orders whose estimates fail.
            last = self._near(None if known else last, aim)
            if last is None:
                break
            room = wanted - self.expect(last)
            fits = fits or (room >= 0 and last.decision not in known)
            if 0 <= room <= _NEAR * wanted or (room > 0 and not last.cost):
                break
            # Move a missed target noticeably: a search within almost the same peak would find the same schedule.
            moved = aim + (room if room >= 0 else min(room, -(wanted // _LOWERED)))
            low, high = (max(low, aim), high) if room >= 0 else (low, min(high, aim))
            # Estimates jump where operators stop fusing, so an aim outside of the known ends is bisected.
            aim = moved if low < moved < high else (low + int(high)) // 2
        return fits

    def _near(self, last: Candidate | None, peak_bytes: int) -> Candidate | None:
        """Return a candidate found near a simulated peak, by a short search or else by a full one.

        Args:
            last: the candidate from whose schedule the short search starts; None: no short search.
            peak_bytes: limit on the simulated peak, in bytes. A short search may return a candidate above it.

        Returns:
            The candidate. None if a full search finds none, or if every schedule exceeds the limit. `aim_above`
            handles such limits, but takes several times as long.
        """
        planner = self.planner
        if peak_bytes < planner.search.least_possible:
            return None
        if last is not None and not planner.is_alone:
            refined = planner.refined(last, peak_bytes, share=_REFINED_SHARE)
            if refined is not None:
                return refined
        try:
            return planner.within_peak(Budget(peak_bytes=peak_bytes))
        except BudgetError:
            return None

    def aim_above(self, lowest: Candidate, off: int, wanted: int) -> None:
        """Search for decisions near an estimated peak, even if no schedule keeps the corresponding simulated peak.

        The first search is within the simulated peak ``wanted + off``. A limit below the simulated peak of
        ``lowest`` is replaced by one slightly above that peak. If values may be offloaded, limits slightly below
        that peak are tried first. The decisions are added to `found`.

        Args:
            lowest: the candidate of the least simulated peak, without offloads.
            off: simulated minus estimated peak of ``lowest``, in bytes.
            wanted: the estimated peak to stay within, in bytes.
        """
        planner = self.planner
        feasible = planner.peak(lowest)
        searches, step = _SEARCHES, feasible // _STEP
        if planner.request.offload is not None:
            searches, step = _OFFLOADED[0], -(feasible // _OFFLOADED[1])
        aim = wanted + off
        for _ in range(searches):
            if aim < feasible:
                # The target is infeasible. A plan slightly above the least simulated peak may have a lower
                # estimated peak. With offloads, a plan may lie slightly below the least peak without offloads.
                feasible += step
                aim = feasible
            try:
                decided = planner.decide(Budget(peak_bytes=aim))
            except BudgetError:
                # Infeasible even with offloads, so raise the target from now on.
                aim, step = 0, abs(step)
                continue
            room = wanted - self.expect(decided)
            if 0 <= room <= _NEAR * wanted or (room > 0 and not decided.cost):
                break
            aim += room


def without_gaps(vertices: Sequence[int]) -> list[int]:
    """Return limits on saved bytes to try: the given ones, and evenly spaced ones in large intervals between them.

    Args:
        vertices: the given limits: saved bytes at vertices of `Prepared.hull`.
    """
    found, most = set(vertices), max(1, max(vertices) // _GAP)
    for a, b in pairwise(sorted(vertices)):
        parts = -(-(b - a) // most)
        found |= {a + (b - a) * k // parts for k in range(1, parts)}
    return sorted(found)


def beside_least(at: Mapping[int, int]) -> list[int]:
    """Return new limits on saved bytes to try: midpoints between the best limit and its neighbours.

    The best limit is the one whose decision has the least estimated peak.

    Args:
        at: for each limit on saved bytes that was tried, the estimated peak of its decision in bytes.
    """
    asked = sorted(at)
    k = min(range(len(asked)), key=lambda i: at[asked[i]])
    return [(a + b) // 2 for a, b in pairwise(asked[max(0, k - 1) : k + 2])]


def input_bytes(joint: JointGraph) -> int:
    """Return the bytes of the parameters and inputs of a captured step, which are alive throughout the step."""
    inputs = [n for n in joint.graph.find_nodes(op="placeholder") if role_of(n) is Role.PRIMAL]
    return sum(Sizes(joint.memories).of_all(inputs).values())


def _refuse_less_than_inputs(planner: Planner, budget: Budget) -> None:
    """Raise a BudgetError if a budget on the peak is in bytes and below the bytes of parameters and inputs."""
    given = input_bytes(planner.state.joint)
    if budget.peak_bytes is not None and budget.peak_bytes < given:
        raise BudgetError(
            f"budget is a peak of {format_bytes(budget.peak_bytes)} ({budget.peak_bytes} bytes), which is infeasible: "
            f"parameters and inputs alone take {format_bytes(given)} ({given} bytes); remat.Peak(0.0) asks for the "
            "least peak that is found"
        )


def _best(
    search: FusedSearch,
    known: Mapping[Decision, int],
    budget: Budget,
    limit: int,
    excess: int,
    last: bool,
) -> Candidate:
    """Choose one of the candidates found, by the rules of `FusedSearch.within`.

    Args:
        search: the search, which holds the candidates.
        known: the compiled peak in bytes of each compiled decision.
        budget: the requested budget.
        limit: the budget in bytes.
        excess: bytes by which an estimated peak must at least be below the limit.
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

    fits = [d for d in new if expected(d) + excess <= limit]
    fits += [d for d in found if known.get(d.decision, limit + 1) <= limit]
    if known and (last or not fits):
        fits = [d for d in new if d is full and expected(d) < lowest] or fits
    if unlike and (budget.peak_bytes or not fits):
        return min(unlike, key=lambda d: d.saved_bytes)
    if fits:
        return min(fits, key=lambda d: (d.cost, taken(d)))
    if known and budget.peak_bytes:
        # A decision that is not even expected to fit is not worth another compilation.
        new = [d for d in new if expected(d) <= limit]
    return min(new or found, key=taken)
