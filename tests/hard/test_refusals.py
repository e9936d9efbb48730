"""What no plan can do is refused with the node, the line and the reason, and nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import PlanError
from tests.graphs import joint_of, node
from tests.hard.steps import pair

T = torch.Tensor


def drops(x: T, w: T) -> T:
    h = torch.nn.functional.dropout(torch.tanh(x @ w), 0.5)
    return h.exp()


def planned(joint: remat.JointGraph, budget: float) -> str:
    """Why a graph cannot be planned; the graph must be as it was."""
    before, names = joint.fingerprint, [n.name for n in joint.graph.nodes]
    with pytest.raises(PlanError) as caught:
        remat.plan(joint, budget)
    assert (joint.fingerprint, [n.name for n in joint.graph.nodes]) == (before, names)
    return str(caught.value)


@pytest.mark.parametrize("budget", [0, 0.3, 1])
def test_what_runs_once_and_cannot_be_handed_over(budget: float) -> None:
    """A draw without a replay, whose result is no tensor: nothing that is known, but it may come."""
    joint = joint_of(drops, *pair())
    drawn = node(joint, "native_dropout")
    drawn.kwargs = {"generator": torch.Generator()}  # type: ignore[dict-item]
    mask = next(n for n in drawn.users if n.args[1] == 1)
    mask.meta["val"] = (mask.meta["val"],)
    text = planned(joint, budget)
    assert "backward reads" in text
    assert "native_dropout = aten.native_dropout.default    # test_refusals.py:20 " in text
    assert "'native_dropout' draws random numbers, has an effect or overwrites its input" in text


def test_tags_that_contradict_each_other() -> None:
    joint = joint_of(drops, *pair())
    drawn = node(joint, "native_dropout")
    mask = next(n for n in drawn.users if n.args[1] == 1)
    mask.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    drawn.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    drawn.kwargs = {"generator": None}
    mask.meta["val"] = mask.meta["val"]
    only_mask_is_read(joint, mask)
    plan = remat.plan(joint, 0)
    assert plan.saved_bytes >= 0


def only_mask_is_read(joint: remat.JointGraph, mask: fx.Node) -> None:
    assert mask.users
