"""``torch.autograd.graph.region_activation_memory_budget``: budgets that the user's code sets itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import remat
from remat.errors import BudgetError
from remat.graph.text import parse_joint, print_joint
from tests.e2e.doors import aot
from tests.hard.steps import assert_same, compiled, drawn, pair, step

region: Any = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
pytestmark = pytest.mark.skipif(region is None, reason="region budgets came in PyTorch 2.13")

T = torch.Tensor

LINEAR = nn.Linear(16, 16)
NORM = nn.BatchNorm1d(16)


def layers(x: T) -> T:
    for _ in range(3):
        x = LINEAR(x).sin()
    return x.cos().sum()


def covered(x: T, share: float = 0.4) -> T:
    with region(share):
        return layers(x)


def nested(x: T) -> T:
    with region(0.9), region(0.4):
        return layers(x)


def normed(x: T) -> T:
    with region(0.4):
        return layers(NORM(x))


def dropped(x: T) -> T:
    with region(0.4):
        return layers(F.dropout(x))


def branched(x: T) -> T:
    with region(0.4):
        y = torch.cond(x.sum() > 0, lambda y: LINEAR(y).sin(), lambda y: y.cos(), (x,))
        return layers(y)


def in_part(x: T) -> T:
    with region(0.4):
        x = layers(x)
    return x.sin() * 2


def conflicting(x: T) -> T:
    with region(0.4):
        x = LINEAR(x).sin()
    with region(0.5):
        return layers(x)


def torn(x: T) -> T:
    with region(0.2):
        x = LINEAR(LINEAR(x).sin()).cos()
    torch._dynamo.graph_break()
    with region(0.7):
        x = LINEAR(LINEAR(x).sin()).cos()
    torch._dynamo.graph_break()
    return layers(x)


def plans_of(f: Callable[..., Any], budget: Any = 0.9, **options: Any) -> list[remat.Plan]:
    """The plans that one step of the compiled program runs on."""
    torch._dynamo.reset()
    before = len(remat.plans())
    options = {"lower": "eager", "budget": budget, **options}
    torch.compile(f, backend="remat", options=options)(drawn(64, 16)).backward()
    return list(remat.plans()[before:])


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_it_holds_instead_of_the_share_that_was_asked_for(share: float) -> None:
    def asking(x: T) -> T:
        return covered(x, share)

    (plan,) = plans_of(asking, 0.5)
    (plainly,) = plans_of(layers, share)
    assert plan.capacity == plainly.capacity == max(plan.least_bytes, int(share * plan.full_bytes))
    assert plan.decision == plainly.decision
    assert "  region  " not in plainly.explain()
    assert plan.saved_bytes <= plan.capacity
    assert (plan.budget, float(plan.region_budget)) == ("0.5", share)


@pytest.mark.parametrize("f", [nested, normed, dropped, branched])
def test_what_covers_the_forward_is_taken(f: Callable[..., Any]) -> None:
    """Also where PyTorch 2.13 stumbles over what nobody wrote: a batch norm's write to its buffers."""
    for plan in plans_of(f):
        assert plan.region_budget == "0.4"
        assert plan.saved_bytes <= max(plan.least_bytes, int(0.4 * plan.full_bytes))
        (line,) = (x for x in plan.explain().splitlines() if x.startswith("  region"))
        assert "the code sets 0.4 for the whole graph" in line
        assert "instead of the budget" in line
        assert remat.Plan.from_json(plan.to_json()).region_budget == "0.4"


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (in_part, r"must cover the entire forward of a graph .* 2 forward op\(s\) are unannotated"),
        (conflicting, r"conflicting budgets within a single joint graph .*\[0\.4, 0\.5\]"),
    ],
)
def test_what_pytorch_refuses_is_refused_in_its_words(f: Callable[..., Any], words: str) -> None:
    theirs = torch.compile(f, backend=aot(min_cut_rematerialization_partition))
    with (
        functorch_config.patch(activation_memory_budget=0.9),
        pytest.raises(RuntimeError, match=words),
    ):
        theirs(drawn(64, 16))
    with pytest.raises(RuntimeError, match=words):
        plans_of(f)
    torch._dynamo.reset()
    joint = remat.capture(f, (drawn(64, 16),), lower="eager")
    with pytest.raises(BudgetError, match=words) as raised:
        remat.plan(joint, 0.5)
    assert "torch._dynamo.graph_break()" in str(raised.value)
    assert "test_region_budgets.py:" in str(raised.value)  # the lines that are meant


def test_graph_breaks_keep_regions_apart() -> None:
    found = plans_of(torn, 0.5)
    assert [p.region_budget for p in found] == ["0.2", "0.7", ""]
    for plan, share in zip(found, (0.2, 0.7, 0.5), strict=True):
        assert plan.capacity == max(plan.least_bytes, int(share * plan.full_bytes))
        assert plan.saved_bytes <= plan.capacity


@pytest.mark.parametrize(("lower", "solver"), [("inductor", "auto"), ("eager", "greedy")])
def test_a_peak_holds_beside_it(lower: Any, solver: str) -> None:
    joint = remat.capture(covered, (drawn(64, 16),), lower=lower)
    own = remat.plan(joint, 0.9).capacity
    plainly = remat.plan(joint, 0.9, solver).peak_bytes
    least = remat.plan(joint, remat.Peak(0.0), solver)
    for budget in (remat.Peak("1GiB"), (least.peak_bytes + plainly) // 2, least.peak_bytes):
        plan = remat.plan(joint, budget, solver)
        assert plan.saved_bytes <= own
        assert plan.peak_bytes <= (plan.requested.peak_bytes or 0)
        assert plan.region_budget == "0.4"
    assert "holds beside" in plan.explain()


def test_every_way_to_a_plan_heeds_it() -> None:
    joint = remat.capture(covered, (drawn(64, 16),), lower="eager")
    capacity = remat.plan(joint, 0.9).capacity
    assert remat.plan(joint, "saved:1MiB").capacity == capacity
    within = remat.plan(joint, remat.Saved(capacity - 1))
    assert within.capacity == capacity - 1
    assert "holds beside" in within.explain()
    assert remat.plan(joint, 0.9, "greedy").capacity == capacity
    assert remat.plan(joint, pipeline=str(remat.default_pipeline(0.9))).capacity == capacity
    assert remat.compare(joint, ("greedy",), (0.9,)).rows[0].capacity == capacity
    again = parse_joint(print_joint(joint))
    assert remat.plan(again, 0.9).capacity == capacity
    applied = remat.plan(joint, plan=remat.plan(joint, 0.9))
    assert (applied.capacity, applied.region_budget) == (capacity, "0.4")


def test_a_frontier_is_over_all_budgets() -> None:
    joint, plainly = (remat.capture(f, (drawn(64, 16),), lower="eager") for f in (covered, layers))
    assert remat.frontier(joint).points == remat.frontier(plainly).points


def test_graphs_planned_together_take_their_own_first() -> None:
    joints = remat.capture(torn, (drawn(64, 16),), lower="eager", fullgraph=False)
    for budget in (0.5, "saved:40KiB"):
        plans = remat.plan(joints, budget)
        assert [p.region_budget for p in plans] == ["0.2", "0.7", ""]
        for plan, share in zip(plans[:2], (0.2, 0.7), strict=True):
            assert plan.saved_bytes <= max(plan.least_bytes, int(share * plan.full_bytes))
        assert plans.saved_bytes <= plans.capacity
    with pytest.raises(BudgetError):
        remat.plan(joints, "saved:1KiB")


def test_gradients_are_those_of_eager() -> None:
    def plainly(x: T, w: T) -> T:
        return F.dropout((x @ w).sin(), 0.3) @ w.cos()

    def asking(x: T, w: T, share: float) -> T:
        with region(share):
            return plainly(x, w)

    f = compiled(asking, budget=0.9, how={"dynamic": False})
    for share in (0.0, 0.5, 1.0):
        left = step(lambda x, w, share=share: f(x, w, share), pair())
        assert_same(left, step(plainly, pair()))
