"""Frontiers by peak: every figure is that of a plan that exists, and none lies below what is proven."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import remat
from remat.errors import ProblemError
from remat.planning import peak_frontier
from remat.planning.frontier import Frontier, FrontierPoint
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from tests.graphs import joint_of, weight
from tests.planning.test_frontier import blocks, bound_at, made_up, rows


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(blocks(), rows())


@pytest.fixture(scope="module")
def by_bytes(joint: remat.JointGraph) -> Frontier:
    return remat.frontier(joint)


@pytest.fixture(scope="module")
def by_peak(joint: remat.JointGraph) -> Frontier:
    return remat.frontier(joint, by="peak")


def proven(found: Frontier, peak_bytes: int) -> Fraction:
    """The height of the bound over a peak; nothing is proven beyond its end."""
    return bound_at(found, peak_bytes) if peak_bytes <= found.bound[-1][0] else Fraction(0)


def test_every_point_by_peak_is_a_plan_with_exactly_these_figures(by_peak: Frontier) -> None:
    assert by_peak.by == "peak"
    assert len(by_peak.points) > 5
    for a, b in pairwise(by_peak.points):
        assert a.peak_bytes < b.peak_bytes
        assert a.recompute_cost > b.recompute_cost
    for point in by_peak.points:
        plan = by_peak.plan(point)
        for name in ("saved_bytes", "recompute_cost", "peak_bytes"):
            assert getattr(plan, name) == getattr(point, name)
        assert plan.asked.peak_bytes == point.peak_bytes
        assert proven(by_peak, point.peak_bytes) <= plan.recompute_bound <= plan.recompute_cost


def test_the_bound_by_peak_is_below_the_plans_of_all_peaks(
    joint: remat.JointGraph, by_peak: Frontier, by_bytes: Frontier
) -> None:
    assert any(cost for _, cost in by_peak.bound)
    for (x0, y0), (x1, y1) in pairwise(by_peak.bound):
        assert x0 < x1
        assert y0 >= y1
    for point in (*by_peak.points, *by_bytes.points):
        assert by_peak.bound[0][0] <= point.peak_bytes
        assert proven(by_peak, point.peak_bytes) <= point.recompute_cost
    planner = Planner.of(joint, PlanRequest.of())
    moments = [i for i, late in enumerate(planner.state.roles.tangent_closure) if late]
    low, high = by_peak.bound[0][0], by_peak.bound[-1][0]
    for k in range(100):
        peak = low + (high - low) * k // 100
        assert bound_at(by_peak, peak) <= planner.bounds.bound(peak, moments)


def test_a_frontier_by_peak_is_near_the_plans_within_its_peaks(
    joint: remat.JointGraph, by_peak: Frontier
) -> None:
    for point in by_peak.points[::4]:
        plan = remat.plan(joint, remat.Peak(point.peak_bytes))
        assert point.recompute_cost <= 1.15 * plan.recompute_cost
    full = remat.plan(joint, 1.0)
    within = [p for p in by_peak.points if p.peak_bytes <= full.peak_bytes]
    assert min(p.recompute_cost for p in within) <= full.recompute_cost


def test_a_frontier_by_peak_has_plans_between_the_least_peak_and_those_without_orders() -> None:
    def waves(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = torch.sin(torch.tanh(x @ w))
        return x

    joint = joint_of(waves, torch.randn(512, 64), *(weight(64, 64) for _ in range(6)))
    points = remat.frontier(joint, by="peak").points
    for share in (0.1, 0.3):
        plan = remat.plan(joint, remat.Peak(share))
        within = [p.recompute_cost for p in points if p.peak_bytes <= 1.05 * plan.peak_bytes]
        assert min(within) <= 1.5 * plan.recompute_cost


def test_a_frontier_by_peak_ends_at_the_least_peak_that_is_found(
    joint: remat.JointGraph, by_peak: Frontier
) -> None:
    least = remat.plan(joint, remat.Peak(0.0))
    lowest = by_peak.points[0]
    assert lowest.peak_bytes <= least.peak_bytes
    assert lowest.recompute_cost <= least.recompute_cost or lowest.peak_bytes < least.peak_bytes
    plan = by_peak.plan(lowest)
    assert (plan.peak_bytes, plan.peak_limit) == (lowest.peak_bytes, 0)


def test_cuts_alone_are_mixed_and_filled_where_a_step_is_too_large_for_orders(
    joint: remat.JointGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_frontier, "FEW_RUNS", 0)
    found = remat.frontier(joint, by="peak")
    planner = Planner.of(joint, PlanRequest.of())
    search = planner.search
    cuts = [search.tried(planner.hull.reduction.invert(v.saved)) for v in planner.hull.vertices]
    for cut in cuts:
        most = cut.peak_bytes * 1.001  # a schedule's peak; those of points are simulated
        within = [p.recompute_cost for p in found.points if p.peak_bytes <= most]
        assert min(within) <= cut.cost
    assert {(p.peak_bytes, p.recompute_cost) for p in found.points} - {
        (c.peak_bytes, c.cost) for c in cuts
    }
    for point in found.points:
        plan = found.plan(point)
        assert (plan.peak_bytes, plan.recompute_cost) == (point.peak_bytes, point.recompute_cost)
    monkeypatch.setattr("remat.planning.peak_planner.SIMULATED", 0)
    unsplit = remat.frontier(joint, by="peak")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.PeakWarning)
        for point in unsplit.points:
            assert abs(unsplit.plan(point).peak_bytes / point.peak_bytes - 1) < 1e-3


def test_the_knee_by_peak_is_on_the_axis_of_peaks() -> None:
    points = tuple(
        FrontierPoint(saved_bytes=s, peak_bytes=p, recompute_cost=c)
        for s, p, c in ((5, 1000, 200), (9, 1100, 145), (1, 1400, 120), (4, 2000, 100))
    )
    found = replace(made_up((0, 0)), by="peak", points=points)
    assert found.knee() == found.points[2]
    assert found.knee(by="chord") == found.points[1]


def test_a_frontier_by_peak_is_drawn_and_written(
    joint: remat.JointGraph, by_peak: Frontier, by_bytes: Frontier, tmp_path: Path
) -> None:
    target, chosen = tmp_path / "f.svg", by_peak.plan(by_peak.points[2])
    other = remat.frontier(joint, "greedy", by="peak")
    assert other.bound == by_peak.bound
    by_peak.plot(target, others=[other])
    plain = target.read_text()
    by_peak.plot(target, chosen=chosen, others=[other])
    assert target.read_text() != plain
    data = json.loads(by_peak.to_json())
    assert data["by"] == "peak"
    assert [FrontierPoint(**p) for p in data["points"]] == list(by_peak.points)
    with pytest.raises(ProblemError, match="others has a frontier by saved, this one is by peak"):
        by_peak.plot(target, others=[by_bytes])
    with pytest.raises(ProblemError, match="by is 'cost'; expected 'saved' or 'peak'"):
        remat.frontier(joint, by="cost")


def test_a_plan_above_the_peak_of_its_point_says_so(by_peak: Frontier) -> None:
    low = replace(by_peak.points[3], peak_bytes=by_peak.points[3].peak_bytes - 1)
    wrong = replace(by_peak, points=(low,), _decided=by_peak._decided[3:4])
    with pytest.warns(remat.PeakWarning, match=rf"above the {low.peak_bytes} bytes") as told:
        wrong.plan(low)
    assert told[0].filename == __file__
