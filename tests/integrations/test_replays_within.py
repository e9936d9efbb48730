"""A draw that is repeated in the half that it was drawn in, as Inductor compiles it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat.integrations import workarounds

T = torch.Tensor


def _drawn_twice(mode: FakeTensorMode) -> tuple[fx.GraphModule, T]:
    """``mask * x`` and ``mask * sin(x)`` of one mask that is drawn, dropped and drawn again."""
    rand = torch.ops.aten.rand_like.default
    graph = fx.Graph()

    def call(target: Any, *args: Any, value: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    given = mode.from_tensor(torch.empty(8, 16))
    state = mode.from_tensor(torch.get_rng_state())
    with mode:
        value = torch.empty_like(given)
    x = graph.placeholder("x")
    x.meta["val"] = given
    saved = call(run_and_save_rng_state, rand, x, value=(state, value))
    kept = call(operator.getitem, saved, 0, value=state)
    first = call(operator.getitem, saved, 1, value=value)
    one = call(torch.ops.aten.mul.Tensor, x, first, value=value)
    again = call(run_with_rng_state, kept, rand, x, value=value)
    sine = call(torch.ops.aten.sin.default, x, value=value)
    two = call(torch.ops.aten.mul.Tensor, sine, again, value=value)
    graph.output((one, two))
    return fx.GraphModule({}, graph), given


def test_the_same_numbers_are_drawn_again() -> None:
    """Although Inductor's fake tensors get the generator's state as it is, which PyTorch refuses."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        gm, given = _drawn_twice(mode)
        run = workarounds.compile_graph(gm, [given])
    x = torch.randn(8, 16)
    torch.manual_seed(5)
    one, two = run([x.clone()])
    torch.manual_seed(5)
    mask = torch.rand_like(x)
    torch.testing.assert_close(one, x * mask)
    torch.testing.assert_close(two, x.sin() * mask)
