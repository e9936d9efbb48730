"""Budgets on the peak of fused code: search by simulated peak, guided by the estimated peak.

What is searched and proven is the peak of the graphs as they are. The peak that a compiler is expected to come
to (`remat.graph.fused_liveness`) is off from it by about as much for one plan as for the next, so the search is
repeated with the peak moved by what the last plan was off: a short search from the last schedule, where orders can
be searched. What was compiled is known, and no longer estimated.
"""

from __future__ import annotations

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

#: Searches that there are at most.
_SEARCHES = 4
#: Part of all bytes that lies between two that are looked at, at most.
_GAP = 16
#: How often bytes between the best ones so far are looked at.
_HALVINGS = 2
#: Share of the least simulated peak by which an aim is raised.
_STEP = 100
#: Searches with offloads, and by what part of the least simulated peak an aim is lowered then.
_OFFLOADED = 5, 150
#: What was compiled is far above a peak by this part of it, as one over it.
_FAR = 10
#: Room below the peak, as a share of it, that is not worth another search.
_NEAR = 0.005
#: Searches from an offset, most of them short: each with this share of the usual edits, from the schedule of the last.
_REFINED, _REFINED_SHARE = 6, 0.5
#: An aim that was missed is lowered by this part of the peak at least, as one over it.
_LOWERED = 1000


def within_fused_peak(
    planner: Planner,
    budget: Budget,
    *,
    excess: int = 0,
    compiled: Mapping[Decision, int] | None = None,
    last: bool = False,
) -> Candidate:
    """The cheapest decision found whose estimated peak is within the budget.

    Where none is, as a prediction is no measurement: the one of the least expected peak. Once that was compiled,
    budget 1's if it is expected to take less than all that were compiled. Else another one: for a peak in bytes one
    that was expected to fit, for a share that of the least expected peak. Else the best of those compiled.

    The last one is chosen with more care. For a peak in bytes it has, cheap or not, the least expected peak of those
    that were not compiled; for a share budget 1's comes first, if it is expected to take less than all compiled. Where those are
    far above the peak, it is the one that saves the least of those that may be lower.

    Args:
        planner: decides the graph.
        budget: a peak, or a share.
        excess: bytes by which the expected peak is to be lower than that.
        compiled: the peaks of decisions that were compiled.
        last: whether no other decision will be compiled.

    Returns:
        The decision; nothing is proven of it. Of a share, ``choice.peak_limit`` is the peak that it came to.

    Raises:
        BudgetError: parameters and inputs alone take more.
    """
    _refuse_less_than_inputs(planner, budget)
    known, limit = compiled or {}, budget.peak_bytes
    search = _FusedSearch(planner)
    vertices = planner.allowed_vertices(VERTICES)
    if limit is not None and not last and planner.request.offload is None:
        search.try_around(vertices, limit - excess)
        if search.aim(limit - excess, known):
            return _unproven(_best(search, known, budget, limit, excess, last))
    at = search.try_saved(without_gaps(vertices))
    for _ in range(_HALVINGS):
        at |= search.try_saved(beside_least(at))
    most = search.expect(planner.full)
    lowest = planner.within_peak(Budget(peak_share=0.0), offload=False)  # what shares are of
    off = planner.peak(lowest) - search.expect(lowest)
    if limit is None:
        least = min(map(planner.expected, search.found))
        limit = least + bytes_of_share(budget.peak_share or 0.0, max(0, most - least))
    search.aim_above(lowest, off, limit - excess)
    best = _unproven(_best(search, known, budget, limit, excess, last))
    share = limit if budget.peak_bytes is None else 0
    return replace(best, choice=replace(best.choice, peak_limit=share))


class _FusedSearch:
    """Collects candidates of one graph for a budget on the peak of fused code.

    Args:
        planner: decides the graph.

    Attributes:
        planner: the same.
        found: all candidates so far.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.found: list[Candidate] = []

    def expect(self, decided: Candidate) -> int:
        """Adds a candidate; returns its estimated peak in bytes."""
        self.found.append(decided)
        return self.planner.expected(decided)

    def try_saved(self, capacities: Iterable[int]) -> dict[int, int]:
        """Adds the decisions within numbers of saved bytes; returns the estimated peak of each."""
        return {nbytes: self.expect(self.planner.at(nbytes)) for nbytes in capacities}

    def try_around(self, capacities: Sequence[int], wanted: int) -> None:
        """Adds decisions within numbers of saved bytes, by bisection to those of the nearest estimated peak."""
        asked = sorted(capacities)
        low, high = 0, len(asked) - 1
        while low <= high:
            middle = (low + high) // 2
            (peak,) = self.try_saved([asked[middle]]).values()
            low, high = (middle + 1, high) if peak <= wanted else (low, middle - 1)

    def aim(self, wanted: int, known: Mapping[Decision, int]) -> bool:
        """Searches near an estimated peak, from the offset of the nearest candidate between both peaks.

        Args:
            wanted: the estimated peak to come to, in bytes.
            known: decisions that were compiled.

        Returns:
            Whether a candidate that was not compiled is expected to be within it.
        """
        planner = self.planner
        self.expect(planner.allowed_full)
        nearest = min(self.found, key=lambda d: abs(planner.expected(d) - wanted))
        aim = wanted + planner.peak(nearest) - planner.expected(nearest)
        last, fits = None, False
        for _ in range(_REFINED):
            last = self._near(last, aim)
            if last is None:
                break
            room = wanted - self.expect(last)
            fits = fits or (room >= 0 and last.decision not in known)
            if 0 <= room <= _NEAR * wanted or (room > 0 and not last.cost):
                break
            # A search within almost the same peak would find the same schedule again.
            aim += room if room >= 0 else min(room, -(wanted // _LOWERED))
        return fits

    def _near(self, last: Candidate | None, peak_bytes: int) -> Candidate | None:
        """A candidate within a simulated peak, by a short search from the last candidate or by a full search.

        None where the peak is that low that only `aim_above` may come to it, which takes several times as long.
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
        """Searches near an estimated peak, at the least simulated peak or above.

        Args:
            lowest: the candidate of the least simulated peak.
            off: bytes by which its simulated peak is above the estimated one.
            wanted: the estimated peak to come to, in bytes.
        """
        planner = self.planner
        feasible = planner.peak(lowest)
        searches, step = _SEARCHES, feasible // _STEP
        if planner.request.offload is not None:
            searches, step = _OFFLOADED[0], -(feasible // _OFFLOADED[1])
        aim = wanted + off
        for _ in range(searches):
            if aim < feasible:
                # Too low. Plans a little above the least simulated peak may be expected to take less than that;
                # with offloads, plans a little below the least peak without them.
                feasible += step
                aim = feasible
            try:
                decided = planner.decide(Budget(peak_bytes=aim))
            except BudgetError:
                aim, step = 0, abs(step)
                continue
            room = wanted - self.expect(decided)
            if 0 <= room <= _NEAR * wanted or (room > 0 and not decided.cost):
                break
            aim += room


def _unproven(decided: Candidate) -> Candidate:
    """The candidate without its bound, since no bound is proven for peaks of fused code."""
    return replace(decided, choice=replace(decided.choice, recompute_bound=0))


def without_gaps(vertices: Sequence[int]) -> list[int]:
    """Byte counts to try: the given ones, and evenly spaced ones in large intervals."""
    found, most = set(vertices), max(1, max(vertices) // _GAP)
    for a, b in pairwise(sorted(vertices)):
        parts = -(-(b - a) // most)
        found |= {a + (b - a) * k // parts for k in range(1, parts)}
    return sorted(found)


def beside_least(at: Mapping[int, int]) -> list[int]:
    """Midpoints between the saved bytes of the least estimated peak and their tried neighbours."""
    asked = sorted(at)
    k = min(range(len(asked)), key=lambda i: at[asked[i]])
    return [(a + b) // 2 for a, b in pairwise(asked[max(0, k - 1) : k + 2])]


def input_bytes(joint: JointGraph) -> int:
    """Bytes of parameters and inputs, which are alive throughout a step."""
    inputs = [n for n in joint.graph.find_nodes(op="placeholder") if role_of(n) is Role.PRIMAL]
    return sum(Sizes(joint.memories).of_all(inputs).values())


def _refuse_less_than_inputs(planner: Planner, budget: Budget) -> None:
    """Refuse a peak below the bytes of inputs and parameters, before any compilation."""
    given = input_bytes(planner.state.joint)
    if budget.peak_bytes is not None and budget.peak_bytes < given:
        raise BudgetError(
            f"budget is a peak of {format_bytes(budget.peak_bytes)} ({budget.peak_bytes} bytes), which is infeasible: "
            f"parameters and inputs alone take {format_bytes(given)} ({given} bytes); remat.Peak(0.0) asks for the "
            "least peak that is found"
        )


def _best(
    search: _FusedSearch,
    known: Mapping[Decision, int],
    budget: Budget,
    limit: int,
    excess: int,
    last: bool,
) -> Candidate:
    planner, found = search.planner, search.found
    expected, full = planner.expected, planner.allowed_full
    new = [d for d in found if d.decision not in known]
    lowest = min(known.values(), default=0)
    unlike: list[Candidate] = []
    if last and lowest > limit + limit // _FAR:
        # What is expected says little of this step, so one that is most unlike what was compiled may be lower.
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
    if known and budget.peak_bytes:  # what was not even expected to fit is not worth compiling
        new = [d for d in new if expected(d) <= limit]
    return min(new or found, key=taken)
