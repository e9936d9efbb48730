"""A draw that is repeated in the half that it was drawn in, as Inductor compiles it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
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


def _compiled() -> Callable[[list[T]], Any]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        gm, x = _drawn_twice(mode)
        return workarounds.compile_graph(gm, [x])


def test_the_same_numbers_are_drawn_again() -> None:
    run = _compiled()
    x = torch.randn(8, 16)
    torch.manual_seed(5)
    one, two = run([x.clone()])
    torch.manual_seed(5)
    mask = torch.rand_like(x)
    torch.testing.assert_close(one, x * mask)
    torch.testing.assert_close(two, x.sin() * mask)


def test_a_state_that_is_real_is_taken_on_fake_tensors() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rand = torch.ops.aten.rand_like.default
    with tracing(TracingContext(mode)):
        gm, x = _drawn_twice(mode)

        def again() -> T:
            with mode:
                # The state is the generator's own, as Inductor's fake tensors get it.
                state, _ = run_and_save_rng_state(rand, x)
                value: T = run_with_rng_state(state, rand, x)
                return value

        with pytest.raises(Exception, match="convert all Tensors to FakeTensors"):
            again()  # once PyTorch takes it, the help can go
        with workarounds.replays_on_fakes(gm.graph, False):
            assert again().shape == x.shape
        assert not mode.allow_non_fake_inputs
