"""Memory against time for one module: the greedy order, few straight lines above its curve, the exact frontier."""

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
from remat.solvers.frontier import KnapsackFrontier, knapsack_frontier
from remat.solvers.problem import KnapsackProblem

#: Corners that the segments are fitted to; of more, neighbours are merged, upwards.
MOST_CORNERS = 400

Point = tuple[float, float]


def as_knapsack(grouping: Grouping, capacity: int) -> KnapsackProblem:
    """The choice of values to store, as a knapsack over the undecided items: bytes against picoseconds."""
    return KnapsackProblem(
        weights=tuple(item.nbytes for item in grouping.free),
        values=tuple(item.runtime_ps for item in grouping.free),
        capacity=capacity,
    )


def exact_frontier(stats: SACStats) -> KnapsackFrontier:
    """Every Pareto-optimal choice of free items: bytes stored against picoseconds not recomputed."""
    grouping = group(stats)
    return knapsack_frontier(as_knapsack(grouping, sum(i.nbytes for i in grouping.free)))


def greedy_order(stats: SACStats) -> SACGreedyOrderMeta:
    """Orders the candidates of a module by the bytes that recomputing frees per time.

    Views are always recomputed. What is decided together is one candidate; what recomputing takes
    no time comes first, then the most bytes per time; equals in the order in which they ran.
    """
    grouping = group(stats)
    written = {i for pair in stats.inplace_ops for i in pair}
    drawn = set(stats.rand_ops)
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
    items = (*grouping.free, *grouping.stored)
    return SACGreedyOrderMeta(
        recomputed_ops=set(grouping.recomputed),
        stored_ops={item.ops[0] for item in grouping.stored},
        inplace_op_groups={
            item.ops[0]: set(item.ops) for item in items if written.intersection(item.ops)
        },
        random_ops_group={
            item.ops[0]: set(item.ops) for item in items if drawn.intersection(item.ops)
        },
        msps_meta=sorted(candidates, key=lambda c: (-c.msps, c.op_idx)),
    )


def greedy_curve(stats: SACStats, order: SACGreedyOrderMeta) -> OrderedDict[float, float]:
    """Fraction of memory discarded to fraction of runtime recomputed, candidate by candidate.

    It begins with the views, which are always recomputed. Candidates that free nothing are left
    out: nobody recomputes them.
    """
    memory, runtime = sum(stats.memory), sum(stats.runtimes)
    spent = sum(stats.runtimes[i] for i in order.recomputed_ops)
    freed = sum(stats.memory[i] for i in order.recomputed_ops)
    curve = OrderedDict([(_share(freed, memory), _share(spent, runtime))])
    for candidate in order.msps_meta:
        if candidate.memory > 0:
            freed += candidate.memory
            spent += candidate.runtime
            curve[_share(freed, memory)] = min(1.0, _share(spent, runtime))
    return curve


def upper_envelope(
    stats: SACStats, order: SACGreedyOrderMeta, n_segments: int = 2
) -> SACTradeOffStats:
    """The greedy curve under ``n_segments`` straight lines.

    To discard a fraction of the memory between two points of the curve, the candidates up to the
    later one have to be recomputed: the curve is a staircase. Each segment lies above all the stairs
    in its range, and among all ways to do that with so many segments, the area under these is the
    least; it is found by dynamic programming over where segments begin. Lines may jump where one
    ends. (PyTorch searches for a least-squares fit, which cuts through the stairs.)

    Raises:
        ProblemError: ``n_segments`` is below 1.
    """
    if isinstance(n_segments, bool) or not isinstance(n_segments, int) or n_segments < 1:
        raise ProblemError(f"n_segments must be 1 or more, got {n_segments!r}")
    curve = greedy_curve(stats, order)
    xs, ys = list(curve), list(curve.values())
    if len(xs) == 1:
        fitted: list[tuple[float, float, float]] = [(xs[0], 0.0, ys[0])]
        end = xs[0]
    else:
        corners = merge_corners(list(zip(xs, ys[1:], strict=False)), MOST_CORNERS)
        end = xs[-1]
        fitted = fit(corners, end, n_segments)
    return SACTradeOffStats(
        n_segments=len(fitted),
        slopes=[slope for _, slope, _ in fitted],
        intercepts=[intercept for _, _, intercept in fitted],
        fit_breaks=[*(x for x, _, _ in fitted), end],
        tradeoff_curve=curve,
        sac_memory=sum(stats.memory),
        sac_runtime=sum(stats.runtimes),
    )


def merge_corners(corners: Sequence[Point], most: int) -> list[Point]:
    """Reduce to a maximum number of corners; each is no further right and no lower than the corners it replaces."""
    if len(corners) <= most:
        return list(corners)
    starts = [k * len(corners) // most for k in range(most)]
    ends = [*starts[1:], len(corners)]
    return [(corners[a][0], corners[b - 1][1]) for a, b in zip(starts, ends, strict=True)]


def fit(corners: Sequence[Point], end: float, segments: int) -> list[tuple[float, float, float]]:
    """Segments above all corners with the least area: (where it begins, slope, intercept)."""
    n = len(corners)
    starts = [*(x for x, _ in corners), end]
    # lines[i][j]: area, slope and intercept of the best line above corners i to i + j.
    lines = [_best_lines(corners, starts, i) for i in range(n)]
    # best[j]: the least area up to corner j, and where the segments under it begin; of equals, the fewest.
    best: list[tuple[float, tuple[int, ...]]] = [(line[0], (0,)) for line in lines[0]]
    for _ in range(1, min(segments, n)):
        more = []
        for j, fewer in enumerate(best):
            options = [(best[i - 1][0] + lines[i][j - i][0], i) for i in range(1, j + 1)]
            area, i = min([(fewer[0], 0), *options])
            more.append((area, (*best[i - 1][1], i)) if i else fewer)
        best = more
    begins = best[-1][1]
    last = [*(i - 1 for i in begins[1:]), n - 1]
    return [(starts[i], *lines[i][j - i][1:]) for i, j in zip(begins, last, strict=True)]


def _best_lines(
    corners: Sequence[Point], starts: Sequence[float], first: int
) -> list[tuple[float, float, float]]:
    """For each last corner, the line above the corners from ``first`` on with the least area.

    The area under a line is its width times its height in the middle, and the lowest line there
    that is above all corners runs along their upper hull.
    """
    hull: list[Point] = []
    found: list[tuple[float, float, float]] = []
    for j in range(first, len(corners)):
        x, y = corners[j]
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
        begin, end = starts[first], starts[j + 1]
        middle = (begin + end) / 2
        k = min(max(bisect_left(hull, (middle, -1.0)), 1), len(hull) - 1)
        if len(hull) == 1:
            slope = 0.0
        else:
            (x0, y0), (x1, y1) = hull[k - 1], hull[k]
            slope = (y1 - y0) / (x1 - x0) if middle <= hull[-1][0] else 0.0
        touches = hull[min(k, len(hull) - 1)] if middle <= hull[-1][0] else hull[-1]
        intercept = max(b - slope * a for a, b in hull) if slope else touches[1]
        found.append(((end - begin) * (slope * middle + intercept), slope, intercept))
    return found


def _turns_up(a: Point, b: Point, c: Point) -> bool:
    """Whether ``b`` lies on or below the line from ``a`` to ``c``."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) >= 0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
