"""Bounds under a peak: no schedule that is known lies below them, and they are not empty."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search.proposers.cuts import Cuts
from remat.solvers.graph.flow import MinimumCut, Network
from remat.solvers.schedule.problem import evaluate_schedule
from remat.units import Budget


class Blocks(nn.Module):
    """Residual blocks with dropout, a norm, views, and an operator with several results."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(16, 64) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(32, 16) for _ in range(depth))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            left, right = inner(self.norm(x)).chunk(2, dim=-1)
            x = x + nn.functional.dropout(outer(torch.tanh(left) * right.sigmoid()), 0.1)
        return x.square().mean()


def convolutions() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    return nn.Sequential(block(), block(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "blocks": (Blocks, (8, 12, 16)),
    "convolutions": (convolutions, (2, 4, 12, 12)),
}
STEPS = [("blocks", "eager"), ("convolutions", "inductor")]


@cache
def planner_of(name: str, lower: Any) -> Planner:
    make, shape = MODELS[name]
    joint = remat.capture(make(), (torch.randn(shape, requires_grad=True),), lower=lower)
    return Planner.of(joint, PlanRequest.of(cost="flops"))


@pytest.mark.parametrize(("name", "lower"), STEPS)
def test_no_decision_and_no_schedule_lies_below(name: str, lower: Any) -> None:
    planner = planner_of(name, lower)
    search, problem = planner.search.schedules, planner.context.lowered.problem
    draw = random.Random(1)
    program_points = search.highest(
        search.candidate(
            planner.context.lowered.saved_of(planner.search.decisions.at_budget_one.decision)
        )
    )
    free = [i for i in range(len(problem)) if problem.savable[i] and problem.recomputable[i]]
    fixed = [i for i in range(len(problem)) if problem.savable[i] and not problem.recomputable[i]]
    bounds, positive = planner.search.bounds, 0
    for _ in range(4):
        share = draw.random()
        tried = search.candidate([*fixed, *(i for i in free if draw.random() < share)])
        bound = bounds.bound(tried.peak_bytes, program_points)
        assert bound <= tried.cost
        wanted = (tried.peak_bytes + search.least_possible) // 2
        found = planner.search.simulated.orders.search_within(tried, wanted)[0]
        bound = bounds.bound(found.peak_bytes, program_points)
        assert bound <= found.cost
        positive += bound > 0
    assert positive, "a bound of nothing proves nothing"


def test_bounds_fall_as_the_peak_rises() -> None:
    planner = planner_of("blocks", "eager")
    search = planner.search.schedules
    tried = search.candidate(
        planner.context.lowered.saved_of(planner.search.decisions.at_budget_one.decision)
    )
    least, program_points = search.least_possible, search.highest(tried)
    peaks = [least + (tried.peak_bytes - least) * k // 12 for k in range(13)]
    found = [planner.search.bounds.bound(p, program_points) for p in peaks]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    plan = remat.plan(planner.context.state.joint, remat.Peak(0.3), cost="flops")
    assert 0 < plan.recompute_bound <= plan.recompute_cost


@pytest.mark.parametrize(("name", "lower"), STEPS)
def test_the_order_that_was_searched_is_the_one_that_runs(name: str, lower: Any) -> None:
    planner = planner_of(name, lower)
    search = planner.search.schedules
    for decided in (
        planner.search.decisions.at_budget_one,
        planner.context.runtime_optimal,
        planner.search.decisions.at(planner.context.least_bytes),
    ):
        saved = planner.context.lowered.saved_of(decided.decision)
        sequence, _, boundary = search.schedule(saved)
        done = evaluate_schedule(search.lowered_schedule.problem, sequence, boundary)
        tried = search.candidate(saved)
        assert done.peak_bytes == tried.peak_bytes
        found = planner.search.simulated.orders.search_within(tried, int(done.peak_bytes * 0.95))[0]
        assert found.decision.is_ordered
        ordered = planner.search.decisions.credited(found)
        assert planner.search.measures.simulated(ordered) <= found.peak_bytes


def test_what_backward_never_reads_has_no_price_below_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, plain = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    joint = remat.capture(
        lambda x: ((x @ weight).exp().sum(), x.exp().sin()), (plain,), lower="eager"
    )
    planner = Planner.of(joint, PlanRequest.of())
    seen = list[int]()
    cut = Network.cut

    def watched(self: Network, weight: Any, penalty: Any = None) -> MinimumCut:
        seen.extend((*weight, *(penalty or ())))
        return cut(self, weight, penalty)

    monkeypatch.setattr(Network, "cut", watched)
    program_points = range(len(planner.context.state.index))
    Cuts(planner.search.schedules).at(dict.fromkeys(program_points, 1.0))
    assert min(seen) >= 0
    assert max(seen) > 0


def test_nothing_is_proven_of_bytes_that_hooks_may_pack() -> None:
    plain = planner_of("blocks", "eager")
    packed = Planner.of(plain.context.state.joint, PlanRequest.of(cost="flops", hooks="bf16"))
    peak = plain.search.least_found
    full = plain.search.measures.simulated(plain.search.decisions.at_budget_one)
    peak += (full - peak) // 4
    for planner, budget, proven in (
        (plain, remat.Peak(peak), True),
        (packed, remat.Peak(0.25), False),
    ):
        decided = planner.decide(Budget.parse(budget))
        assert decided.cost > 0
        assert (decided.provenance.recompute_bound > 0) is proven
