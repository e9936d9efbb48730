"""Frontiers and budgets on the peak: every figure is that of a plan that exists."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from bisect import bisect_right
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetError, PlanError, ProblemError
from remat.planning.frontier import Frontier, FrontierPoint
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.solvers.lagrangian import Lagrangian
from remat.units import Budget
from tests.graphs import joint_of
from tests.models import build

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
    return {solver: remat.frontier(joint, solver) for solver in SOLVERS}


@pytest.fixture(params=SOLVERS)
def found(request: pytest.FixtureRequest, frontiers: dict[str, Frontier]) -> Frontier:
    return frontiers[request.param]


def bound_at(found: Frontier, nbytes: int) -> Fraction:
    """The height of the bound over a number of bytes."""
    at = bisect_right(found.bound, nbytes, key=lambda v: v[0])
    left, right = found.bound[at - 1], found.bound[min(at, len(found.bound) - 1)]
    if left == right:
        return Fraction(left[1])
    share = Fraction(nbytes - left[0], right[0] - left[0])
    return left[1] + share * (right[1] - left[1])


def test_cost_falls_only_where_bytes_rise(found: Frontier) -> None:
    assert len(found.points) > 5
    for a, b in pairwise(found.points):
        assert a.saved_bytes < b.saved_bytes
        assert a.recompute_cost > b.recompute_cost
    assert found.least_bytes <= found.points[0].saved_bytes


def test_every_point_is_a_plan_with_exactly_these_figures(
    joint: remat.JointGraph, found: Frontier
) -> None:
    for point in found.points:
        plan = found.plan(point)
        for name in ("saved_bytes", "recompute_cost", "peak_bytes"):
            assert getattr(plan, name) == getattr(point, name)
        for name in ("unit", "full_bytes", "least_bytes"):
            assert getattr(plan, name) == getattr(found, name)
        assert plan.recompute_bound <= plan.recompute_cost
    again = remat.plan(joint, plan=remat.Plan.from_json(plan.to_json()))
    assert again.saved == plan.saved
    assert Budget.parse(plan.budget) == Budget(nbytes=plan.saved_bytes)


def test_the_bound_is_below_all_points_of_all_solvers(frontiers: dict[str, Frontier]) -> None:
    assert len({f.bound for f in frontiers.values()}) == 1
    for found in frontiers.values():
        for (x0, y0), (x1, y1) in pairwise(found.bound):
            assert x0 < x1
            assert y0 > y1
        for point in found.points:
            assert bound_at(found, point.saved_bytes) <= point.recompute_cost
            assert found.bound[0][0] <= point.saved_bytes
    reached = {(p.saved_bytes, p.recompute_cost) for p in frontiers["lagrangian"].points}
    assert {found.bound[0], found.bound[-1]} <= reached


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


def test_a_point_of_another_frontier_is_refused(frontiers: dict[str, Frontier]) -> None:
    foreign = FrontierPoint(saved_bytes=1, recompute_cost=2, peak_bytes=3)
    with pytest.raises(ProblemError, match=r"not a point of this frontier of \d+ points"):
        frontiers["greedy"].plan(foreign)


def test_json_holds_the_figures(found: Frontier) -> None:
    data = json.loads(found.to_json())
    assert [FrontierPoint(**p) for p in data["points"]] == list(found.points)
    assert tuple(map(tuple, data["bound"])) == found.bound
    for name in ("graph", "solver", "cost", "unit", "full_bytes", "least_bytes"):
        assert data[name] == getattr(found, name)


def test_frontiers_draw_themselves_and_what_was_chosen(
    joint: remat.JointGraph, frontiers: dict[str, Frontier], tmp_path: Path
) -> None:
    auto, target = frontiers["auto"], tmp_path / "f.svg"
    others = [frontiers["greedy"], frontiers["lagrangian"]]
    with pytest.raises(ProblemError, match="cannot be marked on it"):
        auto.plot(target, chosen=remat.plan(joint, 0.5, "greedy", "flops"))
    with pytest.raises(ProblemError, match="have different bounds"):
        auto.plot(target, others=[remat.frontier(joint, "greedy", "flops")])
    assert not target.exists()
    pictures = []
    for chosen in (None, auto.points[2], auto.plan(auto.points[2]), auto.plan(auto.points[2])):
        auto.plot(target, chosen=chosen, others=others)
        pictures.append(target.read_bytes())
    assert len(set(pictures)) == 3, "each mark leaves a trace"
    assert pictures[2] == pictures[3]


def test_every_step_is_told_of(joint: remat.JointGraph) -> None:
    told: list[str] = []
    found = remat.frontier(joint, "greedy", on_step=told.append)
    assert sum(t.startswith("deciding at ") for t in told) >= len(found.points)
    assert sum(t.startswith("simulating ") for t in told) == len(found.points)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_a_plan_is_never_above_its_peak(
    joint: remat.JointGraph, frontiers: dict[str, Frontier], solver: str, share: float
) -> None:
    peaks = [p.peak_bytes for p in frontiers[solver].points]
    assert min(peaks) < max(peaks), "the budget has something to decide"
    allowed = int(min(peaks) + share * (max(peaks) - min(peaks)))
    plan = remat.plan(joint, remat.Peak(allowed), solver)
    assert plan.peak_bytes <= allowed
    assert Budget.parse(plan.budget).peak_bytes == allowed
    unbounded = remat.plan(joint, 1.0, solver)
    if unbounded.peak_bytes <= allowed:  # nothing has to give way, and more bytes may cost less
        assert plan.recompute_cost <= unbounded.recompute_cost
        return
    fits = [p.recompute_cost for p in frontiers[solver].points if p.peak_bytes <= allowed]
    assert plan.recompute_cost <= min(fits), "no worse than the points that were looked at"


def test_a_peak_that_nothing_meets_is_an_error_that_names_what_is_proven(
    joint: remat.JointGraph, frontiers: dict[str, Frontier]
) -> None:
    with pytest.raises(BudgetError, match="which is infeasible") as caught:
        remat.plan(joint, remat.Peak(2), "auto")
    named = re.search(
        r"every schedule of this step has a peak of at least (\d+) bytes", str(caught.value)
    )
    assert named is not None
    proven = int(named[1])
    least = remat.plan(joint, remat.Peak(0.0), "auto").peak_bytes
    assert proven < least <= min(p.peak_bytes for p in frontiers["auto"].points)
    assert remat.plan(joint, remat.Peak(least), "auto").peak_bytes == least
    with pytest.raises(BudgetError, match="no plan was found within it") as caught:
        remat.plan(joint, remat.Peak(proven), "auto")
    for told in (f"({least} bytes)", f"no schedule has less than {proven} bytes"):
        assert told in str(caught.value)
    with pytest.raises(BudgetError, match="infeasible"):
        remat.plan(joint, remat.Peak(proven - 1), "auto")


@pytest.mark.parametrize(("solver", "hooks"), [("greedy", None), ("auto", "int8")])
def test_shares_of_the_peak_reach_from_the_least_found_to_that_of_budget_1(
    joint: remat.JointGraph, solver: str, hooks: str | None
) -> None:
    full = remat.plan(joint, 1.0, solver, hooks=hooks)
    least, half, most = (
        remat.plan(joint, budget, solver, hooks=hooks)
        for budget in (remat.Peak(0), "peak:0.5", remat.Peak(1))
    )
    assert (half.budget, half.asked.label) == ("peak:0.5", "peak 0.5")
    assert least.peak_bytes < full.peak_bytes
    assert 2 * half.peak_bytes <= least.peak_bytes + full.peak_bytes
    assert most.peak_bytes <= full.peak_bytes
    assert most.recompute_cost <= full.recompute_cost


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


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.5)
        return x.sum()


@cache
def dropping(lower: Any = "eager") -> remat.JointGraph:
    return remat.capture(Dropping(), (torch.randn(256, 32),), lower=lower)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_peak_that_a_byte_budget_reaches_costs_no_more(lower: Any) -> None:
    cost = "roofline:h100" if lower == "eager" else "auto"
    for nbytes in (96_142, 157_303, 192_252, 227_202):
        # A CPU's costs would show that the search counts one generator state (5,056 bytes) too many.
        by_bytes = remat.plan(dropping(lower), remat.Saved(nbytes), cost=cost)
        by_peak = remat.plan(dropping(lower), remat.Peak(by_bytes.peak_bytes), cost=cost)
        assert by_peak.peak_bytes <= by_bytes.peak_bytes
        assert by_peak.recompute_cost <= by_bytes.recompute_cost


def test_a_peak_of_what_hooks_pack_costs_no_more_than_bytes_that_reach_it() -> None:
    for nbytes in (157_303, 227_202):
        packed = remat.plan(dropping(), remat.Saved(nbytes), hooks="int8")
        by_peak = remat.plan(dropping(), remat.Peak(packed.peak_bytes), hooks="int8")
        assert by_peak.peak_bytes <= packed.peak_bytes
        cheapest = remat.plan(dropping(), 1.0, hooks="int8")
        if cheapest.peak_bytes <= packed.peak_bytes:
            assert by_peak.recompute_cost == cheapest.recompute_cost


class Moody(Lagrangian):
    """Promises nothing twice."""

    name = "moody"
    deterministic = False


def test_a_plan_within_a_peak_says_whether_it_repeats() -> None:
    full = remat.plan(dropping(), 1.0, "lagrangian").peak_bytes
    allowed = remat.Peak(full * 9 // 10)
    assert remat.plan(dropping(), allowed, "lagrangian").deterministic
    assert not remat.plan(dropping(), allowed, Moody()).deterministic


@pytest.fixture(scope="module")
def resnet() -> remat.JointGraph:
    """Decomposed as for Inductor, with simulated peaks."""
    step = build("resnet")
    joint = remat.capture(step.model, step.args, step.kwargs, lower="inductor")
    return dataclasses.replace(joint, lower="eager")


def test_a_ratio_is_the_cheapest_plan_within_its_bytes_whatever_its_peak(
    resnet: remat.JointGraph,
) -> None:
    cost = "roofline-fused"
    full = remat.plan(resnet, 1.0, cost=cost)
    planner = Planner.of(resnet, PlanRequest.of(cost=cost))
    plans, warned = [], []
    for ratio in (0.02, 0.07, 0.1, 0.13, 0.2, 0.5, 0.9):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = remat.plan(resnet, ratio, cost=cost)
        assert plan.saved_bytes <= plan.capacity < full.capacity
        assert plan.recompute_cost == planner.at(plan.capacity).cost
        more = plan.before_after.more
        assert more is not None
        above = plan.peak_bytes > full.peak_bytes
        in_vain = more > 0.01 and plan.peak_bytes > 0.99 * full.peak_bytes
        assert [w.category for w in caught] == [remat.PeakWarning] * (above or in_vain)
        warned.append(bool(caught))
        plans.append(plan)
    assert any(warned)
    assert not all(warned)
    costs = [p.recompute_cost for p in plans]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("solver", ["dp", "lagrangian"])
def test_no_search_changes_what_a_named_solver_decides(
    resnet: remat.JointGraph, solver: str
) -> None:
    planner = Planner.of(resnet, PlanRequest.of(solver=solver))
    own = planner.at(planner.full_bytes // 4)
    plan = remat.plan(resnet, remat.Saved(planner.full_bytes // 4), solver)
    assert plan.solver == solver
    assert (plan.recompute_cost, plan.saved_bytes) == (own.cost, own.saved_bytes)


class Nothing(remat.Solver):
    """Save as little as possible, whatever the budget."""

    name = "nothing"

    def solve(
        self, problem: remat.KnapsackProblem, *, time_limit: float | None = None
    ) -> list[int]:
        return []


def test_named_solvers_within_a_peak_have_plans_of_their_own(joint: remat.JointGraph) -> None:
    full = remat.plan(joint, 1.0)
    least = remat.plan(joint, remat.Peak(0.0))
    lowest = remat.plan(joint, remat.Peak(0.0), Nothing())
    limit = (lowest.peak_bytes + full.peak_bytes) // 2
    assert least.peak_bytes < lowest.peak_bytes
    plans = {s: remat.plan(joint, limit, s) for s in ("auto", "greedy", "lagrangian", Nothing())}
    assert all(p.peak_bytes <= limit for p in plans.values())
    costs = {getattr(s, "name", s): p.recompute_cost for s, p in plans.items()}
    assert costs["auto"] <= min(costs.values())
    assert costs["nothing"] > costs["auto"], "the search of auto does not stand in for it"
    assert plans["greedy"].solver == "greedy"
    rows = remat.compare(joint, ("auto", "greedy"), limit).rows
    assert [r.recompute_cost for r in rows] == [costs["auto"], costs["greedy"]]


def test_a_named_solver_without_a_plan_within_a_peak_names_its_least(
    joint: remat.JointGraph,
) -> None:
    least = remat.plan(joint, remat.Peak(0.0)).peak_bytes
    with pytest.raises(
        BudgetError, match=r"found within it by 'nothing'.* give budget=[0-9]+"
    ) as e:
        remat.plan(joint, least, Nothing())
    named = int(str(e.value).split("give budget=")[1].split(".")[0])
    assert remat.plan(joint, named, Nothing()).peak_bytes <= named


def test_what_a_warning_of_the_peak_names_helps(joint: remat.JointGraph) -> None:
    full = remat.plan(joint)
    assert (full.budget, full.saved) == ("1", remat.plan(joint, 1).saved)
    with pytest.warns(remat.PeakWarning) as told:
        plan = remat.plan(joint, 0.0)
    text = str(told[0].message)
    assert told[0].filename == __file__
    for nbytes in (plan.peak_bytes, full.peak_bytes):
        assert f"({nbytes} bytes)" in text
    assert plan.peak_bytes > full.peak_bytes
    named = re.search(r"as text (peak:[0-9.]+),", text)
    assert named is not None
    assert remat.plan(joint, named[1]).peak_bytes <= full.peak_bytes


def test_bytes_beyond_those_of_budget_1_may_peak_higher(joint: remat.JointGraph) -> None:
    full = remat.plan(joint, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = remat.plan(joint, remat.Saved(2 * full.full_bytes))
        compared = remat.compare(joint, "lagrangian", (0.0, 0.3, 1.0))
        remat.frontier(joint)
    assert more.recompute_cost <= full.recompute_cost
    assert [r.reason for r in compared.rows] == [None, None, None]
    assert compared.rows[0].peak_bytes == remat.plan(joint, 0.0, "lagrangian").peak_bytes
