"""Frontiers: every figure is that of a plan that exists, and none lies below what is proven."""

from __future__ import annotations

import json
import warnings
from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError, ProblemError
from remat.planning.frontier import Frontier, FrontierPoint
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search.effort import DEFAULT
from remat.planning.search.search import Search
from remat.units import Budget
from tests.graphs import joint_of, weight

SOLVERS = ("greedy", "lagrangian", "auto")


class Block(nn.Module):
    """Products and pointwise operators around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(torch.tanh(h) * torch.sigmoid(h))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def rows() -> torch.Tensor:
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(blocks(), rows())


@pytest.fixture(scope="module")
def frontiers(joint: remat.JointGraph) -> dict[str, Frontier]:
    by_saved = {solver: remat.frontier(joint, solver) for solver in SOLVERS}
    return {**by_saved, "by peak": remat.frontier(joint, by="peak")}


@pytest.fixture
def by_peak(frontiers: dict[str, Frontier]) -> Frontier:
    return frontiers["by peak"]


@pytest.fixture(params=(*SOLVERS, "by peak"))
def found(request: pytest.FixtureRequest, frontiers: dict[str, Frontier]) -> Frontier:
    return frontiers[request.param]


def bytes_of(found: Frontier, point: FrontierPoint) -> int:
    """The bytes on the axis of a frontier."""
    return point.peak_bytes if found.by == "peak" else point.saved_bytes


def bound_at(found: Frontier, nbytes: int) -> Fraction:
    """The height of the bound over a number of bytes; by peak, nothing is proven beyond its end."""
    at = bisect_right(found.bound, nbytes, key=lambda v: v[0])
    left, right = found.bound[at - 1], found.bound[min(at, len(found.bound) - 1)]
    if found.by == "peak" and nbytes > right[0]:
        return Fraction(0)
    if left == right:
        return Fraction(left[1])
    share = Fraction(nbytes - left[0], right[0] - left[0])
    return left[1] + share * (right[1] - left[1])


def test_every_point_is_a_plan_with_exactly_these_figures(
    joint: remat.JointGraph, found: Frontier
) -> None:
    assert len(found.points) > 5
    for a, b in pairwise(found.points):
        assert bytes_of(found, a) < bytes_of(found, b)
        assert a.recompute_cost > b.recompute_cost
    for point in found.points:
        plan = found.plan(point)
        for name in ("saved_bytes", "recompute_cost", "peak_bytes"):
            assert getattr(plan, name) == getattr(point, name)
        for name in ("unit", "full_bytes", "least_bytes"):
            assert getattr(plan, name) == getattr(found, name)
        assert plan.least_bytes <= plan.saved_bytes
        limit = plan.requested.peak_bytes if found.by == "peak" else plan.requested.nbytes
        assert limit == bytes_of(found, point)
        assert plan.recompute_bound <= plan.recompute_cost
        if found.by == "peak":
            assert bound_at(found, limit) <= plan.recompute_bound
    again = remat.plan(joint, plan=remat.Plan.from_json(plan.to_json()))
    assert again.saved == plan.saved
    assert Budget.parse(plan.budget) == plan.requested


def test_the_bounds_are_below_all_points_of_all_solvers(
    joint: remat.JointGraph, frontiers: dict[str, Frontier], by_peak: Frontier
) -> None:
    assert len({frontiers[solver].bound for solver in SOLVERS}) == 1
    for found in (frontiers["auto"], by_peak):
        assert any(cost for _, cost in found.bound)
        for (x0, y0), (x1, y1) in pairwise(found.bound):
            assert x0 < x1
            assert y0 >= y1 if found is by_peak else y0 > y1
        for point in (p for other in frontiers.values() for p in other.points):
            assert found.bound[0][0] <= bytes_of(found, point)
            assert bound_at(found, bytes_of(found, point)) <= point.recompute_cost
    bound = frontiers["lagrangian"].bound
    reached = {(p.saved_bytes, p.recompute_cost) for p in frontiers["lagrangian"].points}
    assert {bound[0], bound[-1]} <= reached
    planner = Planner.of(joint, PlanRequest.of())
    program_points = [
        i for i, late in enumerate(planner.context.state.roles.tangent_closure) if late
    ]
    low, high = by_peak.bound[0][0], by_peak.bound[-1][0]
    for k in range(100):
        peak = low + (high - low) * k // 100
        assert bound_at(by_peak, peak) <= planner.search.bounds.bound(peak, program_points)


def test_a_plan_under_a_budget_is_the_point_of_the_frontier(
    joint: remat.JointGraph, frontiers: dict[str, Frontier]
) -> None:
    found = frontiers["auto"]
    inside = [p for p in found.points if p.saved_bytes < found.full_bytes]
    assert len(inside) > 5
    for point in inside[::2]:
        plan = remat.plan(joint, remat.Saved(point.saved_bytes), "auto")
        assert plan.recompute_cost == point.recompute_cost


def made_up(*points: tuple[int, int]) -> Frontier:
    return Frontier(
        graph="g",
        solver="s",
        cost="unit",
        unit="op",
        points=tuple(
            FrontierPoint(saved_bytes=b, recompute_cost=c, peak_bytes=0) for b, c in points
        ),
        bound=points,
        full_bytes=1,
        least_bytes=0,
        _planner=cast(Any, None),
        _decided=(),
    )


def test_the_knee_by_either_rule() -> None:
    # Scaled: (0, 1), (0.1, 0.45), (0.4, 0.2), (1, 0).
    found = made_up((1000, 200), (1100, 145), (1400, 120), (2000, 100))
    assert found.knee() == found.points[2], "0.2 from the origin, squared, against 0.2125"
    assert found.knee(by="origin") == found.points[2]
    assert found.knee(by="chord") == found.points[1], "0.55 from the chord's corner against 0.6"
    with pytest.raises(ProblemError, match="expected 'origin' or 'chord'"):
        found.knee(by="corner")
    single = made_up((10, 3))
    assert single.knee() == single.knee(by="chord") == single.points[0]


def test_the_knee_by_peak_is_on_the_axis_of_peaks() -> None:
    points = tuple(
        FrontierPoint(saved_bytes=s, peak_bytes=p, recompute_cost=c)
        for s, p, c in ((5, 1000, 200), (9, 1100, 145), (1, 1400, 120), (4, 2000, 100))
    )
    found = replace(made_up((0, 0)), by="peak", points=points)
    assert found.knee() == found.points[2]
    assert found.knee(by="chord") == found.points[1]


def test_a_point_of_another_frontier_is_refused(frontiers: dict[str, Frontier]) -> None:
    foreign = FrontierPoint(saved_bytes=1, recompute_cost=2, peak_bytes=3)
    with pytest.raises(ProblemError, match=r"not a point of this frontier of \d+ points"):
        frontiers["greedy"].plan(foreign)


def test_json_holds_the_figures(found: Frontier) -> None:
    data = json.loads(found.to_json())
    assert [FrontierPoint(**p) for p in data["points"]] == list(found.points)
    assert tuple(map(tuple, data["bound"])) == found.bound
    for name in ("graph", "solver", "cost", "unit", "full_bytes", "least_bytes", "by"):
        assert data[name] == getattr(found, name)


def test_frontiers_draw_themselves_and_what_was_chosen(
    joint: remat.JointGraph, frontiers: dict[str, Frontier], by_peak: Frontier, tmp_path: Path
) -> None:
    auto, target = frontiers["auto"], tmp_path / "f.svg"
    others = [frontiers["greedy"], frontiers["lagrangian"]]
    with pytest.raises(ProblemError, match="cannot be marked on it"):
        auto.plot(target, chosen=remat.plan(joint, 0.5, "greedy", "flops"))
    with pytest.raises(ProblemError, match="have different bounds"):
        auto.plot(target, others=[remat.frontier(joint, "greedy", "flops")])
    with pytest.raises(ProblemError, match="others has a frontier by saved, this one is by peak"):
        by_peak.plot(target, others=[auto])
    with pytest.raises(ProblemError, match="by is 'cost'; expected 'saved' or 'peak'"):
        remat.frontier(joint, by="cost")
    assert not target.exists()
    pictures = []
    for chosen in (None, auto.points[2], auto.plan(auto.points[2]), auto.plan(auto.points[2])):
        auto.plot(target, chosen=chosen, others=others)
        pictures.append(target.read_bytes())
    assert len(set(pictures)) == 3, "each mark leaves a trace"
    assert pictures[2] == pictures[3]


def test_every_step_is_told_of(joint: remat.JointGraph) -> None:
    told: list[str] = []
    found = remat.frontier(joint, "greedy", on_progress=told.append)
    assert sum(t.startswith("deciding at ") for t in told) >= len(found.points)
    assert sum(t.startswith("simulating ") for t in told) == len(found.points)


def test_a_frontier_is_made_anew_where_declarations_have_changed() -> None:
    @torch.library.custom_op("remat_sweep::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: gradient * 2)
    joint = remat.capture(
        lambda x, w: (twice(x @ w).sin() @ w).sum(),
        (torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)),
        lower="eager",
    )
    remat.declare_pure("remat_sweep::twice")
    frontier = remat.frontier(joint)
    remat.undeclare_pure("remat_sweep::twice")
    with pytest.raises(PlanError, match="operators that are declared pure have changed"):
        frontier.plan(frontier.points[0])


# By peak -----------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(Search.__init__, "__defaults__", (replace(DEFAULT, few=0),))
    found = remat.frontier(joint, by="peak")
    planner = Planner.of(joint, PlanRequest.of())
    cuts = [
        planner.search.schedules.candidate(planner.context.hull.reduction.invert(v.saved))
        for v in planner.context.hull.vertices
    ]
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
    unsimulated = replace(DEFAULT, few=0, all_peaks=replace(DEFAULT.all_peaks, simulated=0))
    monkeypatch.setattr(Search.__init__, "__defaults__", (unsimulated,))
    unsplit = remat.frontier(joint, by="peak")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.PeakWarning)
        for point in unsplit.points:
            assert abs(unsplit.plan(point).peak_bytes / point.peak_bytes - 1) < 1e-3


def test_a_plan_above_the_peak_of_its_point_says_so(by_peak: Frontier) -> None:
    low = replace(by_peak.points[3], peak_bytes=by_peak.points[3].peak_bytes - 1)
    wrong = replace(by_peak, points=(low,), _decided=by_peak._decided[3:4])
    with pytest.warns(remat.PeakWarning, match=rf"above the {low.peak_bytes} bytes") as told:
        wrong.plan(low)
    assert told[0].filename == __file__
