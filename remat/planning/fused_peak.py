"""A peak in bytes for code that a compiler fuses: the search within a simulated peak, aimed by a prediction.

What is searched and proven is the peak of the graphs as they are. The peak that a compiler is expected to come
to (`remat.graph.fused_liveness`) is off from it by about as much for one plan as for the next, so the search is
repeated with the peak moved by what the last plan was off. What was compiled is known, and no longer expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from remat.errors import BudgetError
from remat.graph.fused_liveness import predict_peak
from remat.graph.joint import Role, role_of
from remat.graph.lowering import Decision
from remat.graph.storages import Sizes
from remat.planning.decider import VERTICES, Decided
from remat.planning.planner import Planner
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


@dataclass(frozen=True, slots=True)
class Expected:
    """A decision for code that a compiler fuses.

    Attributes:
        decided: the decision; nothing is proven of it.
        limit: the peak that was asked for: of a share, that between the least and budget 1's expected.
        inputs: bytes of parameters and inputs; no plan has a lower peak.
    """

    decided: Decided
    limit: int
    inputs: int


def within_fused_peak(
    planner: Planner,
    budget: Budget,
    *,
    excess: int = 0,
    compiled: Mapping[Decision, int] | None = None,
    last: bool = False,
) -> Expected:
    """The cheapest decision found whose expected peak is within a budget on it.

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

    Raises:
        BudgetError: parameters and inputs alone take more.
    """
    inputs = _refuse_less_than_inputs(planner, budget)
    known = compiled or {}
    found: list[tuple[Decided, int]] = []

    def tried(decided: Decided) -> int:
        found.append((decided, predicted(planner, decided)))
        return found[-1][1]

    most_saved = planner.peaks.most_saved
    vertices = [n for n, _ in planner.cuts(VERTICES) if most_saved is None or n <= most_saved]
    at = {nbytes: tried(planner.at(nbytes)) for nbytes in without_gaps(vertices)}
    for _ in range(_HALVINGS):
        for nbytes in beside_least(at):
            at[nbytes] = tried(planner.at(nbytes))
    full = planner.peaks.full
    most = tried(full)
    lowest = planner.peaks.within(Budget(peak_share=0.0), offload=False)  # what shares are of
    off = planner.peak(lowest) - tried(lowest)
    least = min(expected for _, expected in found)
    limit = budget.peak_bytes
    if limit is None:
        limit = least + bytes_of_share(budget.peak_share or 0.0, max(0, most - least))
    wanted = limit - excess
    feasible = planner.peak(lowest)
    searches, step = _SEARCHES, feasible // _STEP
    if planner.request.offload is not None:
        searches, step = _OFFLOADED[0], -(feasible // _OFFLOADED[1])
    aim = wanted + off
    for _ in range(searches):
        if aim < feasible:
            # Too low. Plans a little above the least simulated peak may be expected to take less than that; with
            # offloads, plans a little below the least peak without them.
            feasible += step
            aim = feasible
        try:
            decided = planner.decide(Budget(peak_bytes=aim))
        except BudgetError:
            aim, step = 0, abs(step)
            continue
        room = wanted - tried(decided)
        if 0 <= room <= _NEAR * wanted or (room > 0 and not decided.cost):
            break
        aim += room
    best = _best(found, full, known, budget, limit, excess, last)
    share = limit if budget.peak_bytes is None else 0
    best = replace(best, choice=replace(best.choice, recompute_bound=0, peak_limit=share))
    return Expected(best, limit, inputs)


def without_gaps(vertices: Sequence[int]) -> list[int]:
    """Bytes that are looked at: those, and some evenly between two that are far from each other."""
    found, most = set(vertices), max(1, max(vertices) // _GAP)
    for a, b in pairwise(sorted(vertices)):
        parts = -(-(b - a) // most)
        found |= {a + (b - a) * k // parts for k in range(1, parts)}
    return sorted(found)


def beside_least(at: Mapping[int, int]) -> list[int]:
    """Bytes halfway from those of the least expected peak to the next ones that were looked at."""
    asked = sorted(at)
    k = min(range(len(asked)), key=lambda i: at[asked[i]])
    return [(a + b) // 2 for a, b in pairwise(asked[max(0, k - 1) : k + 2])]


def _refuse_less_than_inputs(planner: Planner, budget: Budget) -> int:
    """Refuses a peak that is below what is alive throughout, before anything is compiled; returns those bytes."""
    joint = planner.state.joint
    inputs = [n for n in joint.graph.find_nodes(op="placeholder") if role_of(n) is Role.PRIMAL]
    given = sum(Sizes(joint.memories).of_all(inputs).values())
    if budget.peak_bytes is not None and budget.peak_bytes < given:
        raise BudgetError(
            f"budget is a peak of {format_bytes(budget.peak_bytes)} ({budget.peak_bytes} bytes), which is infeasible: "
            f"parameters and inputs alone take {format_bytes(given)} ({given} bytes); remat.Peak(0.0) asks for the "
            "least peak that is found"
        )
    return given


def _best(
    found: Sequence[tuple[Decided, int]],
    full: Decided,
    known: Mapping[Decision, int],
    budget: Budget,
    limit: int,
    excess: int,
    last: bool,
) -> Decided:
    new = [(d, expected) for d, expected in found if d.decision not in known]
    lowest = min(known.values(), default=0)
    unlike: list[Decided] = []
    if last and lowest > limit + limit // _FAR:
        # What is expected says little of this step, so one that is most unlike what was compiled may be lower.
        unlike = [d for d, expected in new if expected <= (limit if budget.peak_bytes else lowest)]
    if last and new and budget.peak_bytes and not unlike:
        return min(new, key=lambda pair: pair[1])[0]
    fits = [pair for pair in new if pair[1] + excess <= limit]
    fits += [(d, known[d.decision]) for d, _ in found if known.get(d.decision, limit + 1) <= limit]
    if known and (last or not fits):
        fits = [p for p in new if p[0] is full and p[1] < lowest] or fits
    if unlike and (budget.peak_bytes or not fits):
        return min(unlike, key=lambda d: d.saved_bytes)
    if fits:
        return min(fits, key=lambda pair: (pair[0].cost, pair[1]))[0]
    if known and budget.peak_bytes:  # what was not even expected to fit is not worth compiling
        new = [pair for pair in new if pair[1] <= limit]
    return min(new or found, key=lambda pair: known.get(pair[0].decision, pair[1]))[0]


def predicted(planner: Planner, decided: Decided) -> int:
    done = planner.split(decided)
    assert done.forward is not None
    assert done.backward is not None
    outputs = done.joint.num_fwd_outputs
    return predict_peak(done.forward, done.backward, outputs, done.joint.memories).nbytes
