"""What no plan can do is refused with the node, the line and the reason, and nothing is changed."""

from __future__ import annotations

import pytest
import torch

import remat
from remat.errors import PlanError
from tests.graphs import joint_of, node
from tests.hard.steps import pair

T = torch.Tensor


def drops(x: T, w: T) -> T:
    h = torch.nn.functional.dropout(torch.tanh(x @ w), 0.5)
    return h.exp()


def planned(joint: remat.JointGraph) -> str:
    """Why a graph cannot be planned; the graph must be as it was."""
    before, names = joint.fingerprint, [n.name for n in joint.graph.nodes]
    with pytest.raises(PlanError) as caught:
        remat.plan(joint, 0.3)
    assert (joint.fingerprint, [n.name for n in joint.graph.nodes]) == (before, names)
    return str(caught.value)


@torch.library.custom_op("remat_refusals::hidden", mutates_args=())
def hidden(x: T) -> T:
    return x + torch.randn(x.shape)


hidden.register_fake(torch.empty_like)
hidden.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_what_is_not_declared_pure_is_named() -> None:
    joint = joint_of(lambda x, w: hidden(torch.tanh(x @ w)).exp(), *pair())
    made = node(joint, "hidden")
    made.meta["val"] = (made.meta["val"],)
    text = planned(joint)
    declare = "remat.declare_pure('remat_refusals::hidden')"
    assert f"'hidden' is not declared pure ({declare}), so" in text
    assert "draws" not in text


def test_what_runs_once_and_cannot_be_handed_over() -> None:
    """A draw without a replay, whose result is no tensor: nothing that is known, but it may come."""
    joint = joint_of(drops, *pair())
    drawn = node(joint, "native_dropout")
    drawn.kwargs = {"generator": torch.Generator()}  # type: ignore[dict-item]
    mask = next(n for n in drawn.users if n.args[1] == 1)
    mask.meta["val"] = (mask.meta["val"],)
    text = planned(joint)
    assert "backward reads" in text
    line = drops.__code__.co_firstlineno + 1
    assert f"native_dropout = aten.native_dropout.default    # test_refusals.py:{line} h = " in text
    assert "'native_dropout' draws random numbers, so that it must not run twice" in text
