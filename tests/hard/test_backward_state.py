"""Hooks that run in backward as Python: their state is an input of forward that only backward reads.

PyTorch runs such graphs under compiled autograd alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd, config
from torch.fx.experimental._backward_state import BackwardState
from torch.nn import functional as F

import remat
from remat.graph.joint import Role, role_of
from tests.graphs import placeholders
from tests.hard.steps import assert_same, compiled, drawn, step

T = torch.Tensor


@pytest.fixture(autouse=True)
def _compiled_autograd() -> Iterator[None]:
    with config.patch(compiled_autograd=True):
        yield


class Hooked(nn.Module):
    """Hooks before and after the backward of two modules, and on what is in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        for module in (self.first, self.last):
            module.register_full_backward_hook(lambda m, inward, outward: (inward[0] * 2,))
            module.register_full_backward_pre_hook(lambda m, outward: (outward[0].sin(),))

    def forward(self, x: T) -> T:
        h = torch.tanh(self.first(x.sin()))
        h.register_hook(lambda g: g * 3)  # type: ignore[no-untyped-call]
        return F.dropout(torch.tanh(self.last(h)), 0.4).exp()


def hooked() -> tuple[nn.Module, tuple[T, ...]]:
    torch.manual_seed(0)
    return Hooked(), (drawn(6, 8),)


def run(f: Callable[..., Any], args: Any, model: nn.Module) -> dict[str, Any]:
    with compiled_autograd._enable(torch.compile(backend="eager")):
        return step(f, args, model)


def test_a_step_is_the_same() -> None:
    model, args = hooked()
    expected = step(model, args, model)
    model, args = hooked()
    before = len(remat.plans())
    assert_same(run(compiled(model, budget=0), args, model), expected)
    (plan,) = remat.plans()[before:]
    assert bool(plan.recomputed)


def test_both_halves_take_the_state() -> None:
    model, args = hooked()
    joint = remat.capture(model, args, lower="eager")
    states = [n.name for n in joint.graph.nodes if role_of(n) is Role.BACKWARD_STATE]
    assert [type(n.meta["val"]) for n in joint.graph.nodes if n.name in states] == [BackwardState]
    plan = remat.plan(joint, 0)
    inputs = [n for n in placeholders(joint.graph) if not n.startswith("tangents")]
    assert placeholders(plan.forward) == inputs, "AOTAutograd counts on their places"
    assert placeholders(plan.backward)[-1:] == states
