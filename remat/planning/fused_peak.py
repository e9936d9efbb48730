"""A peak in bytes for code that a compiler fuses: the search within a simulated peak, aimed by a prediction.

What is searched and proven is the peak of the graphs as they are. The peak that a compiler is expected to come
to (`remat.graph.fused_liveness`) is off from it by about as much for one plan as for the next, so the search is
repeated with the peak moved by what the last plan was off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.errors import BudgetError
from remat.graph.fused_liveness import predict_peak
from remat.planning.decider import VERTICES, Decided
from remat.planning.planner import Planner
from remat.units import Budget, bytes_of_share

#: Searches that there are at most.
_SEARCHES = 4
#: Room below the peak, as a share of it, that is not worth another search.
_NEAR = 0.005


@dataclass(frozen=True, slots=True)
class Expected:
    """A decision for code that a compiler fuses.

    Attributes:
        decided: the decision; nothing is proven of it.
        peak_bytes: the peak that is expected of it.
        limit: the peak that was asked for: of a share, that between the least and budget 1's expected.
    """

    decided: Decided
    peak_bytes: int
    limit: int


def within_fused_peak(planner: Planner, budget: Budget, *, excess: int = 0) -> Expected:
    """The cheapest decision found whose expected peak is within a budget on it.

    Where none is: the one of the least expected peak, which may do, as a prediction is no measurement.

    Args:
        planner: decides the graph.
        budget: a peak, or a share.
        excess: bytes by which the expected peak is to be lower than that.
    """
    found: list[tuple[Decided, int]] = []

    def tried(decided: Decided) -> int:
        found.append((decided, _predicted(planner, decided)))
        return found[-1][1]

    for nbytes, _ in planner.cuts(VERTICES):
        tried(planner.at(nbytes))
    most = tried(planner.full)
    lowest = planner.decide(Budget(peak_share=0.0))
    off = planner.peak(lowest) - tried(lowest)
    least = min(expected for _, expected in found)
    limit = budget.peak_bytes
    if limit is None:
        limit = least + bytes_of_share(budget.peak_share or 0.0, max(0, most - least))
    wanted = limit - excess
    aim = wanted + off
    for _ in range(_SEARCHES):
        try:
            decided = planner.decide(Budget(peak_bytes=aim))
        except BudgetError:
            break
        room = wanted - tried(decided)
        if 0 <= room <= _NEAR * wanted or (room > 0 and not decided.cost):
            break
        aim += room
    fits = [pair for pair in found if pair[1] <= wanted]
    best, expected = min(fits or found, key=lambda x: (x[0].cost, x[1]) if fits else x[1:])
    best = replace(best, choice=replace(best.choice, recompute_bound=0))
    return Expected(best, expected, limit)


def _predicted(planner: Planner, decided: Decided) -> int:
    done = planner.split(decided)
    assert done.forward is not None
    assert done.backward is not None
    outputs = done.joint.num_fwd_outputs
    return predict_peak(done.forward, done.backward, outputs, done.joint.memories).nbytes
