"""The schedule problem of a joint graph: the schedule of every plan has the peak that is simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.graph.memory.liveness import memory_curve
from remat.graph.problems.schedule_lowering import lower_schedule
from remat.planning.pipelines import modules_of, split
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.units import Budget
from tests.graphs import evaluated


class Branches(nn.Module):
    """Views, an operator with several results, dropout, a skip, and a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(self.norm(x)).chunk(2, dim=-1)
        y = nn.functional.dropout(torch.tanh(left) * right, 0.1)
        z = self.second(y + self.seen) + x
        with torch.no_grad():
            self.seen.add_(z.mean(0).mean(0))
        return z.transpose(0, 1).reshape(-1, 16).exp()


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_the_schedule_of_a_plan_has_its_peak(lower: Any) -> None:
    x = torch.randn(4, 6, 16, requires_grad=True)
    joint = remat.capture(Branches(), (x,), lower=lower)
    planner = Planner.of(joint, PlanRequest.of())
    state = planner.context.state
    lowered = lower_schedule(state.joint, state.index, state.roles, planner.context.lowered)
    seen, beyond = set(), set()
    for share in (1.0, 0.6, 0.3, 0.0):
        decided = planner.decide(Budget.parse(share))
        done = split(replace(planner.context.state, decision=decided.decision))
        modules = modules_of(done)
        peak = memory_curve(*modules, joint.num_fwd_outputs).peak_bytes
        found = evaluated(lowered, *modules)
        assert found.peak_bytes == peak
        assert lowered.least_peak <= peak
        seen.add(peak)
        beyond.add(found.cost - decided.cost)
    assert len(beyond) == 1, "all nodes once, and what is recomputed"
    assert len(seen) > 1, "the budget has something to decide"


def test_a_backward_that_runs_nothing_has_no_boundary() -> None:
    weight = torch.randn(4, requires_grad=True)
    joint = remat.capture(lambda x: (x + weight, x.exp()), (torch.randn(4),), lower="eager")
    plan = remat.plan(joint, remat.Peak(0.5))
    assert plan.recompute_cost == 0
    assert not [n for n in plan.backward.graph.nodes if n.op == "call_function"]


def test_tangents_do_not_raise_the_bound_of_forward() -> None:
    """Backward returns a view of the tangent and runs nothing; forward peaks while it sorts."""

    def step(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight.sum(0), x.sort().values

    inputs = torch.randn(2, 2, requires_grad=True), torch.randn(2)
    joint = remat.capture(step, inputs, lower="eager")
    search = Planner.of(joint, PlanRequest.of(cost="unit")).search
    assert search.schedules.least_possible <= search.least_found
    plan = remat.plan(joint, remat.Peak(search.least_found), cost="unit")
    assert plan.peak_bytes == search.least_found
