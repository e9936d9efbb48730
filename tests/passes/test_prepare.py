"""Passes over the joint graph besides `cse`: dead code, tags, tuples."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import remat
from remat.passes.core.state import State
from remat.passes.joint.cleanup_recompute_tags import CleanupRecomputeTags
from remat.passes.joint.dce import DeadCode
from tests.graphs import calls, joint_of, node, traced, weight

X = torch.linspace(-1, 1, 9).view(3, 3)


def test_dead_code_goes_and_draws_and_effects_stay() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.sin().exp()
        torch.rand_like(x).cos()
        y.add_(1)
        return x.tanh()

    joint = traced(f, X, X.clone())
    result = DeadCode().run(State(joint=joint))
    assert calls(joint.graph) == ["rand_like", "add_", "tanh"]
    assert (result.modified, result.detail) == (True, "3 nodes removed")
    assert not DeadCode().run(result.state).modified


def test_the_stream_of_random_numbers_survives_planning() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y.exp().sum()

    joint = joint_of(f, weight(3))
    graph = joint.graph
    with graph.inserting_after(node(joint, "sin")):
        drawn = graph.call_function(torch.ops.aten.rand.default, ([3],))
        drawn.meta["val"] = node(joint, "sin").meta["val"].new_empty(3)
    for budget in (0, 1):
        plan = remat.plan(joint, budget)
        assert drawn.name in calls(plan.forward)
        assert drawn.name not in calls(plan.backward)


def test_boundaries_between_checkpointed_regions_are_saved() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def f(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(block, x, use_reentrant=False)
        x = checkpoint(block, x, use_reentrant=False)
        return x.sum()

    joint = joint_of(f, weight(16, 16))
    tags = {n.name: n.meta.get("recompute") for n in joint.graph.nodes}
    assert tags["cos"] is CheckpointPolicy.PREFER_RECOMPUTE
    result = CleanupRecomputeTags().run(State(joint=joint))
    assert result.modified
    changed = {
        n.name: n.meta.get("recompute")
        for n in joint.graph.nodes
        if n.meta.get("recompute") is not tags[n.name]
    }
    assert changed == {"cos": CheckpointPolicy.MUST_SAVE}
    for budget in (0, 1):
        plan = remat.plan(joint, budget)
        assert "cos" in plan.saved
        assert "cos" not in plan.recomputed


def test_one_region_has_no_boundary() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).exp().sum()

    joint = joint_of(f, weight(16, 16))
    assert not CleanupRecomputeTags().run(State(joint=joint)).modified
