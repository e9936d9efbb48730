"""Propose decisions that are Pareto-optimal by (peak, cost), without a separate search for each peak.

1. The first decisions are minimum cuts with one price for every saved byte: vertices of the hull of the graph problem.
2. Mixtures of two neighbouring decisions are evaluated. A mixture takes the choices of one decision up to a node, and
   the other decision's choices after the node. In a model of equal layers, successive mixtures differ in a few layers.
3. For each of many peaks, the cheapest decision within that peak is changed to save further values, many at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT
from remat.planning.search.pool import Limits
from remat.planning.search.schedules import Schedules
from remat.solvers.graph.pareto import lower_hull
from remat.solvers.graph.problem import worth_saving


def mixed(
    schedules: Schedules, starts: Iterable[Iterable[int]], on_progress: Callable[[str], None]
) -> list[Candidate]:
    """Search for the frontier by peak and cost; return its candidates, lowest peak first.

    Args:
        schedules: the decisions of the graph; decisions that are found are added to ``schedules.seen``.
        starts: decisions to start from, each as its saved nodes of the graph problem; at least one.
        on_progress: called with a line of text before each stage.
    """
    on_progress("scheduling cuts")
    for start in starts:
        schedules.candidate(start)
    on_progress("mixing cuts")
    _mix(schedules)
    on_progress("adding what has room")
    _add(schedules)
    return schedules.seen.pareto()


def _mix(schedules: Schedules) -> None:
    """Evaluate mixtures of two neighbouring candidates on the lower hull of (peak, cost)."""
    best = lower_hull(schedules.seen.pareto(), lambda d: (d.peak_bytes, d.cost))
    size, divisions = schedules.problem.size, DEFAULT.all_peaks.parts
    part = max(1, (best[-1].peak_bytes - best[0].peak_bytes) // divisions)
    for low, high in pairwise(best):
        parts = round((high.peak_bytes - low.peak_bytes) / part)
        differ = sorted({*low.saved} ^ {*high.saved})
        total = sum(size[i] for i in differ)
        # The layers near the loss, or those far from it, may be the cheaper ones to recompute.
        for order in (differ, differ[::-1]):
            saved, nbytes = {*low.saved}, 0
            for i in order:
                before, nbytes = parts * nbytes // max(1, total), nbytes + size[i]
                saved ^= {i}
                if before < parts * nbytes // max(1, total) < parts:
                    schedules.candidate(saved)


def _add(schedules: Schedules) -> None:
    """For many peaks, evaluate decisions that save more values than the cheapest candidate within the peak."""
    seen, effort = schedules.seen, DEFAULT.all_peaks
    left = len(seen) + DEFAULT.evaluations(len(schedules.context.state.index), effort.least)
    best = [t.peak_bytes for t in seen.pareto()]
    low, high = best[0], best[-1]
    targets = {low + (high - low) * k // effort.parts for k in range(effort.parts)}
    # In this order, the first targets already cover the whole range, in case the evaluations run out.
    for peak_bytes in _spread(sorted({*targets, *best[:-1]})):
        candidate = seen.cheapest(Limits(peak_bytes=peak_bytes))
        assert candidate is not None, f"a candidate has a peak of at most {peak_bytes} bytes"
        values = _room(schedules, candidate, peak_bytes)
        while values and len(seen) < left:
            if schedules.candidate((*candidate.saved, *values)).peak_bytes <= peak_bytes:
                break
            # `_room` only estimates, so it may propose too many values: keep the quarter with the highest cost per
            # byte.
            values = values[: len(values) // 4]


def _room(schedules: Schedules, candidate: Candidate, peak_bytes: int) -> list[int]:
    """Return recomputed values that can probably all be saved within a peak, highest cost per byte first."""
    problem, (begin, first, _) = schedules.problem, schedules.uses()
    room = np.full(len(schedules.context.state.index) + 1, peak_bytes)
    for program_point, nbytes in candidate.alive.items():
        if program_point >= 0:
            room[program_point] -= nbytes
    values = []
    for i in worth_saving(problem, candidate.saved):
        free_bytes = room[begin[i] : first[i]]
        if problem.size[i] and free_bytes.size and free_bytes.min() >= problem.size[i]:
            free_bytes -= problem.size[i]
            values.append(i)
    return values


def _spread(items: list[int]) -> list[int]:
    """Return the items in the order of positions 0, 8, 16, …, then 1, 9, 17, …, and so on."""
    return [item for k in range(8) for item in items[k::8]]
