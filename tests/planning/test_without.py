"""What a step takes without remat: known to every plan, kept in files, and told everywhere."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from benchmarks.workloads import Convolutions
from remat.graph.costs import CostModel, Flops
from remat.graph.costs.base import node_costs
from remat.planning.context import COST_ERROR
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.units import format_bytes
from tests.graphs import joint_of
from tests.models import build
from tests.planning.test_peak_budgets import Nothing

MODEL = nn.Sequential(
    *(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))
)


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(MODEL, torch.randn(64, 16))


@pytest.mark.parametrize(
    ("budget", "cost"),
    [(0.3, "roofline"), ("saved:8GiB", "flops"), (remat.Peak(0.3), "flops")],
)
def test_it_is_the_plan_at_budget_1(joint: remat.JointGraph, budget: Any, cost: str) -> None:
    full, plan = remat.plan(joint, 1, cost=cost), remat.plan(joint, budget, cost=cost)
    assert plan.without_peak_bytes == full.peak_bytes
    assert plan.without_cost == full.step_cost + full.recompute_cost
    assert plan.step_cost == full.step_cost
    assert full.before_after.more == 0


@pytest.mark.parametrize(
    ("name", "error", "solver"),
    [
        pytest.param("bert", COST_ERROR, "min-cut", id="a gain within the error"),
        pytest.param("gpt2", COST_ERROR, "auto", id="a gain beyond the error"),
        pytest.param("unet", 0, "min-cut", id="a higher peak once compiled"),
        pytest.param("bert", 0, "auto", id="a lower peak"),
    ],
)
def test_only_a_surely_better_decision_replaces_the_cut_at_budget_1(
    name: str, error: float, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remat.planning.search.proposers.solver.COST_ERROR", error)
    if name == "unet":
        joint = remat.capture(Convolutions(16), (torch.randn(2, 3, 16, 16),))
    else:
        step = build(name)
        joint = remat.capture(step.model, step.args, step.kwargs)
    cut, full, named = (remat.plan(joint, 1, by) for by in ("cut", "auto", "lagrangian"))
    assert full.solver == solver
    assert (full.saved == cut.saved) == (solver == "min-cut")
    assert full.estimated_peak_bytes <= cut.estimated_peak_bytes
    assert named.recompute_cost < cut.recompute_cost, "a solver that the user names decides alone"
    for plan in (cut, full, named, remat.plan(joint, 0.5, "lagrangian")):
        assert plan.without_cost == full.step_cost + full.recompute_cost
        assert plan.without_estimated_bytes == full.estimated_peak_bytes


def test_a_step_costs_every_operator_once(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0.3, cost="flops")
    state = Planner.of(joint, PlanRequest.of(cost="flops")).context.state
    assert plan.step_cost == sum(node_costs(state.index, state.storages, Flops()))
    forward = 4 * 2 * 2 * 64 * 16 * 64
    assert plan.step_cost > 2.5 * forward, (
        "backward multiplies twice for each product, but the first"
    )


def test_less_memory_takes_more_time(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0.3)
    assert plan.peak_bytes < plan.without_peak_bytes
    more = plan.before_after.more
    assert more is not None
    assert 0 < more < 1
    text = plan.explain()
    without = f"instead of {format_bytes(plan.without_peak_bytes)} without remat"
    assert f"{format_bytes(plan.peak_bytes)} {without}" in text
    assert f"{more:.1%} more than the" in text
    assert "without remat is budget 1" in text
    assert f"{more:.1%} of the step more" in str(plan)
    full = remat.plan(joint, 1)
    assert "(100% of " in full.explain()
    above = replace(full, saved_bytes=25 * full.full_bytes)
    assert f"(more than the {format_bytes(full.full_bytes)} that" in dict(above.rows)["saved"]


def test_files_keep_it_and_files_from_before_are_read(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0.3)
    again = remat.Plan.from_json(plan.to_json())
    assert again.before_after == plan.before_after
    assert remat.plan(joint, plan=again).before_after == plan.before_after
    old = json.loads(plan.to_json())
    for name in ("step_cost", "without_peak_bytes", "without_cost"):
        del old[name]
    read = remat.Plan.from_json(json.dumps(old))
    assert read.before_after.more is None
    assert "without remat" not in read.explain()
    assert "modelled" not in read.explain()


def test_hooks_and_pipelines_are_compared_with_the_same_step(joint: remat.JointGraph) -> None:
    plain, packed = remat.plan(joint, 1), remat.plan(joint, 1, hooks="bf16")
    assert packed.without_peak_bytes == plain.peak_bytes > packed.peak_bytes
    piped = remat.plan(joint, pipeline=remat.default_pipeline(0.3))
    assert piped.without_peak_bytes == 0, "a pipeline makes no plan at budget 1"
    assert piped.step_cost == plain.step_cost


class ForwardOnly(CostModel):
    """Prices what runs in forward and nothing else."""

    name, unit = "forward-only", "op"

    def cost(self, node: Any) -> int:
        if "backward" in str(node.target):
            raise ValueError("no such operator in my table")
        return 1


def test_a_model_that_cannot_price_backward_still_plans(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0.3, cost=ForwardOnly())
    assert plan.step_cost == 0
    assert plan.without_peak_bytes > plan.peak_bytes
    assert "% more" not in plan.explain()


def test_comparisons_have_one_step_without_remat(joint: remat.JointGraph) -> None:
    found = remat.compare(joint, ("greedy", "auto"), (0.2, 1))
    plan = remat.plan(joint, 1)
    assert found.without_peak_bytes == plan.peak_bytes
    assert (found.step_cost, found.unit) == (plan.step_cost, "ps")
    for row in found.rows:
        assert row.more == pytest.approx((row.recompute_cost or 0) / plan.step_cost)
    assert str(found).startswith(f"without remat: peak {format_bytes(plan.peak_bytes)}, step ")
    data = json.loads(found.to_json())
    assert data["without_peak_bytes"] == plan.peak_bytes
    assert [r["more"] for r in data["rows"]] == [r.more for r in found.rows]


class Gated(nn.Module):
    """A block of which budget 1 recomputes something, more or less of it by solver."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("several", [False, True])
def test_it_is_the_same_step_for_every_solver(several: bool) -> None:
    joint = joint_of(nn.Sequential(Gated(), Gated()), torch.randn(8, 64, 16))
    graphs: Any = [joint] if several else joint
    auto, nothing = (remat.plan(graphs, remat.Peak(0.9), s) for s in ("auto", Nothing()))
    assert auto.without_peak_bytes == nothing.without_peak_bytes
    costs = {plan.before_after.without_cost for plan in (auto, nothing)}
    assert len(costs) == 1
    assert costs != {0}


def test_the_backend_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    with caplog.at_level(logging.INFO, logger="remat"):
        options = {"budget": 0.3, "lower": "eager"}
        compiled = torch.compile(MODEL, backend="remat", options=options)
        compiled(torch.randn(64, 16)).sum().backward()
    plan = remat.plans()[-1]
    (line,) = [r.getMessage() for r in caplog.records if "at budget 0.3" in r.getMessage()]
    assert plan.before_after.line in line
    assert "without remat is budget 1" in line


def test_several_graphs_have_one_step() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = MODEL(x)
        torch._dynamo.graph_break()
        return MODEL(y).sum()

    joints = remat.capture(broken, (torch.randn(64, 16),), lower="eager", fullgraph=False)
    plans, full = remat.plan(joints, 0.3), remat.plan(joints, 1)
    assert plans.without_peak_bytes == full.peak_bytes > plans.peak_bytes
    assert plans.before_after.step_cost == sum(p.step_cost for p in plans)
    assert plans.before_after.line in plans.explain().splitlines()[0]
    lines = repr(plans).splitlines()
    assert len(lines) == 1 + len(plans)
    assert remat.PlanSet.from_json(plans.to_json()).before_after == plans.before_after


def test_warnings_of_steps_for_inductor_go_by_expected_peaks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16),
        nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    joint = remat.capture(model, (torch.randn(8, 3, 32, 32),), lower="inductor")
    warned = []
    for budget in (1.0, 0.4, 0.0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = remat.plan(joint, budget)
        higher = plan.estimated_peak_bytes > 1.01 * plan.without_estimated_bytes
        assert [w.category for w in caught] == [remat.PeakWarning] * higher
        figures = (
            f"({plan.estimated_peak_bytes} bytes, estimated before compiling: plan.estimated_peak_bytes)",
            f"({plan.without_estimated_bytes} bytes, likewise: plan.without_estimated_bytes)",
            "that of budget 1 of this graph; or by bytes if the graph is the whole step",
        )
        assert all(text in str(w.message) for w in caught for text in figures)
        warned.append(higher)
    assert warned == [False, False, True]
