"""Trade-off between a module's saved memory and recompute time: greedy order, fitted lines, exact frontier."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from remat.errors import ProblemError
from remat.sac.estimation.stats import (
    MSPS,
    PS_PER_MS,
    Grouping,
    SACGreedyOrderMeta,
    SACStats,
    SACTradeOffStats,
    group,
)
from remat.solvers.problem import KnapsackProblem

#: Largest number of corners of a staircase curve in a fit. A corner is the upper left end of a stair. If a curve
#: has more corners, neighbouring ones are merged, because a fit's time grows at least with the square of the
#: number of corners.
MOST_CORNERS = 400

Point = tuple[float, float]


def as_knapsack(grouping: Grouping, capacity: int) -> KnapsackProblem:
    """Build the knapsack problem of choosing a module's results to store: weights in bytes, values in picoseconds."""
    return KnapsackProblem(
        weights=tuple(item.nbytes for item in grouping.free),
        values=tuple(item.runtime_ps for item in grouping.free),
        capacity=capacity,
    )


def greedy_order(stats: SACStats) -> SACGreedyOrderMeta:
    """Order a module's candidates for recomputation by freed bytes per recompute time, largest first.

    Operators that are always recomputed or always stored are no candidates. Operators that share a
    decision are one candidate. Candidates without recompute time come first; candidates with equal
    ratios stay in the order in which they run.
    """
    grouping = group(stats)
    candidates = [
        MSPS(
            func_names={stats.func_names[i] for i in item.ops},
            op_idx=item.ops[0],
            memory=item.nbytes,
            runtime=item.runtime_ps / PS_PER_MS,
            msps=item.nbytes * PS_PER_MS / item.runtime_ps if item.runtime_ps else math.inf,
        )
        for item in grouping.free
    ]

    def items_with(ops: set[int]) -> dict[int, set[int]]:
        items = (*grouping.free, *grouping.stored)
        return {item.ops[0]: set(item.ops) for item in items if ops.intersection(item.ops)}

    return SACGreedyOrderMeta(
        recomputed_ops=set(grouping.recomputed),
        stored_ops={item.ops[0] for item in grouping.stored},
        inplace_op_groups=items_with({i for pair in stats.inplace_ops for i in pair}),
        random_ops_group=items_with(set(stats.rand_ops)),
        msps_meta=sorted(candidates, key=lambda c: (-c.msps, c.op_idx)),
    )


def greedy_curve(stats: SACStats, order: SACGreedyOrderMeta) -> OrderedDict[float, float]:
    """Return the curve of recomputed runtime over discarded memory along a module's greedy order.

    At the curve's first point, only the operators that are always recomputed run again. At each further
    point of the curve, the next candidate runs again as well.

    Returns:
        Dict from the fraction of memory discarded to the fraction of runtime recomputed.
    """
    memory, runtime = sum(stats.memory), sum(stats.runtimes)
    spent = sum(stats.runtimes[i] for i in order.recomputed_ops)
    freed = sum(stats.memory[i] for i in order.recomputed_ops)
    curve = OrderedDict([(_share(freed, memory), _share(spent, runtime))])
    for candidate in order.msps_meta:
        if candidate.memory > 0:  # recomputing a candidate that frees nothing has no benefit
            freed += candidate.memory
            spent += candidate.runtime
            curve[_share(freed, memory)] = min(1.0, _share(spent, runtime))
    return curve


def upper_envelope(
    stats: SACStats, order: SACGreedyOrderMeta, n_segments: int = 2
) -> SACTradeOffStats:
    """Fit up to ``n_segments`` straight lines above a module's greedy curve of recomputed runtime over freed memory.

    The greedy curve is a staircase, because freeing one more byte recomputes the whole next candidate.
    Each fitted line lies on or above all stairs in the line's range. Dynamic programming finds the lines
    with the least total area below them, up to merged corners (see `MOST_CORNERS`). Consecutive lines
    need not meet. PyTorch's estimator computes a least-squares fit, which cuts through the stairs.

    Raises:
        ProblemError: ``n_segments`` is not an int of at least 1.
    """
    if isinstance(n_segments, bool) or not isinstance(n_segments, int) or n_segments < 1:
        raise ProblemError(f"n_segments must be 1 or more, got {n_segments!r}")
    curve = greedy_curve(stats, order)
    xs, ys = list(curve), list(curve.values())
    # A curve of a single point has one stair, without width.
    corners = list(zip(xs, ys[1:], strict=False)) or [(xs[0], ys[0])]
    fitted = fit(merge_corners(corners, MOST_CORNERS), xs[-1], n_segments)
    return SACTradeOffStats(
        n_segments=len(fitted),
        slopes=[slope for _, slope, _ in fitted],
        intercepts=[intercept for _, _, intercept in fitted],
        fit_breaks=[*(x for x, _, _ in fitted), xs[-1]],
        tradeoff_curve=curve,
        sac_memory=sum(stats.memory),
        sac_runtime=sum(stats.runtimes),
    )


def merge_corners(corners: Sequence[Point], most: int) -> list[Point]:
    """Merge neighbouring corners of a rising staircase, up and to the left, until at most ``most`` are left."""
    if len(corners) <= most:
        return list(corners)
    starts = [k * len(corners) // most for k in range(most)]
    ends = [*starts[1:], len(corners)]
    return [(corners[a][0], corners[b - 1][1]) for a, b in zip(starts, ends, strict=True)]


def fit(corners: Sequence[Point], end: float, segments: int) -> list[tuple[float, float, float]]:
    """Fit line segments above all corners of a rising staircase, with the least total area below the segments.

    Args:
        corners: upper left ends (x, y) of the stairs of a rising staircase, from left to right.
        end: x at which the last segment ends.
        segments: largest number of segments.

    Returns:
        For each segment, (x at which the segment begins, slope, intercept).
    """
    n = len(corners)
    starts = [*(x for x, _ in corners), end]
    # lines[i][j]: area, slope and intercept of the best line above corners i to i + j.
    lines = [_best_lines(corners, starts, i) for i in range(n)]
    # best[j]: the least area up to corner j, and the corners at which segments begin. With equal areas,
    # the fit with fewer segments stays.
    best: list[tuple[float, tuple[int, ...]]] = [(line[0], (0,)) for line in lines[0]]
    for _ in range(1, min(segments, n)):
        extended = []
        for j, fewer in enumerate(best):
            options = [(best[i - 1][0] + lines[i][j - i][0], i) for i in range(1, j + 1)]
            area, i = min([(fewer[0], 0), *options])
            extended.append((area, (*best[i - 1][1], i)) if i else fewer)
        best = extended
    begins = best[-1][1]
    last = [*(i - 1 for i in begins[1:]), n - 1]
    return [(starts[i], *lines[i][j - i][1:]) for i, j in zip(begins, last, strict=True)]


def _best_lines(
    corners: Sequence[Point], starts: Sequence[float], first: int
) -> list[tuple[float, float, float]]:
    """For each corner j from ``first`` on, return area, slope and intercept of the best line above ``first`` to j."""
    hull: list[Point] = []
    lines: list[tuple[float, float, float]] = []
    for j in range(first, len(corners)):
        x, y = corners[j]
        while len(hull) > 1 and turns_up(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
        # The area below a line is the width of its range times its height at the middle of the range. So the
        # best line extends the edge of the corners' upper convex hull that spans the middle.
        begin, end = starts[first], starts[j + 1]
        middle = (begin + end) / 2
        if len(hull) == 1 or middle > x:
            # A falling line would cut the last stair, which reaches to the end.
            slope, intercept = 0.0, y
        else:
            # The search compares x only, because -1.0 is below every y.
            k = max(bisect_left(hull, (middle, -1.0)), 1)
            (x0, y0), (x1, y1) = hull[k - 1], hull[k]
            slope = (y1 - y0) / (x1 - x0)
            intercept = max(b - slope * a for a, b in hull)
        lines.append(((end - begin) * (slope * middle + intercept), slope, intercept))
    return lines


def turns_up(a: Point, b: Point, c: Point) -> bool:
    """Whether point ``b`` lies on or below the line from point ``a`` to point ``c``."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) >= 0


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0
