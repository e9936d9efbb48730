"""The greedy curve, and the fitted segments above it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.errors import ProblemError
from remat.sac.estimation.stats import SACStats, SACTradeOffStats
from remat.sac.estimation.tradeoff import (
    fit,
    greedy_curve,
    greedy_order,
    merge_corners,
    upper_envelope,
)
from tests.sac.planned import example
from tests.sac.solve.test_choices import modules


def test_the_greedy_curve_of_the_example() -> None:
    stats = example()
    curve = greedy_curve(stats, greedy_order(stats))
    # Views first, then 1 (100 bytes in 5 ms), 2 (100 in 8), 3 (120 in 15), 5 and 7 (100 in 14).
    x = [0, 100, 200, 320, 420]
    assert list(curve) == pytest.approx([b / 420 for b in x])
    assert list(curve.values()) == pytest.approx([t / 63 for t in (1, 6, 14, 29, 43)])


def value_at(fitted: SACTradeOffStats, x: float) -> float:
    """Return the envelope at a fraction of memory discarded; beyond the last segment, its last value."""
    breaks = fitted.fit_breaks
    k = min(max(bisect_left(breaks, x) - 1, 0), fitted.n_segments - 1)
    return fitted.slopes[k] * min(x, breaks[-1]) + fitted.intercepts[k]


@settings(max_examples=100, deadline=None)
@given(modules(), st.integers(1, 5))
def test_segments_are_above_every_stair(stats: SACStats, segments: int) -> None:
    order = greedy_order(stats)
    fitted = upper_envelope(stats, order, segments)
    xs, ys = list(fitted.tradeoff_curve), list(fitted.tradeoff_curve.values())
    assert 1 <= fitted.n_segments <= segments
    assert len(fitted.fit_breaks) == fitted.n_segments + 1
    assert fitted.fit_breaks == sorted(fitted.fit_breaks)
    for (a, b), y in zip(pairwise(xs), ys[1:], strict=True):
        for x in (a + (b - a) * 1e-9, (a + b) / 2, b):
            assert value_at(fitted, x) >= y - 1e-6


def area(fitted: list[tuple[float, float, float]], end: float) -> float:
    ends = [*(x for x, _, _ in fitted[1:]), end]
    return sum(
        (b - a) * (slope * (a + b) / 2 + intercept)
        for (a, slope, intercept), b in zip(fitted, ends, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 3),
)
def test_no_other_segments_have_less_area(steps: list[tuple[int, int]], segments: int) -> None:
    corners, x, y = [], 0.0, 1.0
    for dx, dy in steps:
        corners.append((x, y))
        x, y = x + dx, y + dy
    best = area(fit(corners, x, segments), x)

    def lowest(i: int, j: int) -> float:
        """Return the least area of a line above corners i to j: through two corners, or flat."""
        part, right = corners[i : j + 1], corners[j + 1][0] if j + 1 < len(corners) else x
        lines = [(0.0, max(b for _, b in part))]
        for (a, b), (c, d) in combinations(part, 2):
            slope = (d - b) / (c - a)
            if all(slope * p + b - slope * a >= q - 1e-9 for p, q in part):
                lines.append((slope, b - slope * a))
        left = part[0][0]
        return min((right - left) * (s * (left + right) / 2 + t) for s, t in lines)

    n = len(corners)
    totals = [
        sum(lowest(a, b - 1) for a, b in zip((0, *cuts), (*cuts, n), strict=True))
        for k in range(min(segments, n))
        for cuts in combinations(range(1, n), k)
    ]
    assert best == pytest.approx(min(totals))


def test_merged_corners_bound_those_they_stand_for() -> None:
    corners = [(k / 1000, (k / 1000) ** 2) for k in range(1000)]
    merged = merge_corners(corners, 90)
    assert len(merged) == 90
    for x, y in corners:
        left = [b for a, b in merged if a <= x]
        assert max(left) >= y
    assert merge_corners(corners, 1000) == corners


def test_a_module_without_memory_has_a_point_for_a_curve() -> None:
    stats = SACStats(["add"], [1.0], [0], [], [], [], [], False)
    fitted = upper_envelope(stats, greedy_order(stats))
    assert (fitted.n_segments, fitted.fit_breaks, fitted.slopes) == (1, [0.0, 0.0], [0.0])


@pytest.mark.parametrize("segments", [0, -1, 1.5, True])
def test_segments_that_cannot_be_meant(segments: object) -> None:
    with pytest.raises(ProblemError, match="n_segments must be 1 or more"):
        upper_envelope(example(), greedy_order(example()), segments)  # type: ignore[arg-type]
