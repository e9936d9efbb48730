"""A peak in bytes for code that a compiler fuses: the search within a simulated peak, aimed by a prediction.

What is searched and proven is the peak of the graphs as they are. The peak that a compiler is expected to come
to (`remat.graph.fused_liveness`) is off from it by about as much for one plan as for the next, so the search is
repeated with the peak moved by what the last plan was off.
"""

from __future__ import annotations

from dataclasses import replace

from remat.errors import BudgetError
from remat.graph.fused_liveness import predict_peak
from remat.planning.decider import Decided
from remat.planning.planner import Planner
from remat.units import Budget

#: Searches that there are at most.
_SEARCHES = 4
#: Room below the peak, as a share of it, that is not worth another search.
_NEAR = 0.005


def within_fused_peak(planner: Planner, peak_bytes: int) -> Decided:
    """The cheapest decision found whose predicted peak is within one; nothing is proven of it.

    Raises:
        BudgetError: none is found.
    """
    best: Decided | None = None
    least = planner.decide(Budget(peak_share=0.0))
    aim = peak_bytes + planner.peak(least) - _predicted(planner, least)
    if _predicted(planner, least) <= peak_bytes:
        best = least
    for _ in range(_SEARCHES):
        try:
            found = planner.decide(Budget(peak_bytes=aim))
        except BudgetError:
            if best is None:
                raise
            break
        room = peak_bytes - _predicted(planner, found)
        if room >= 0 and (best is None or found.cost < best.cost):
            best = found
        if 0 <= room <= _NEAR * peak_bytes or not (found.cost or room < 0):
            break
        aim += room
    if best is None:
        lowest = _predicted(planner, least)
        raise BudgetError(
            f"no plan is expected to keep to a peak of {peak_bytes} bytes as it is compiled: the least that is "
            f"expected of any plan found is {lowest} bytes. Raise the budget, or make the model or the batch "
            "smaller"
        )
    return replace(best, choice=replace(best.choice, recompute_bound=0))


def _predicted(planner: Planner, decided: Decided) -> int:
    done = planner.split(decided)
    assert done.forward is not None
    assert done.backward is not None
    outputs = done.joint.num_fwd_outputs
    return predict_peak(done.forward, done.backward, outputs, done.joint.memories).nbytes
