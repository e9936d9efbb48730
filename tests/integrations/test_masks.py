"""Masks on their way to backward, and draws on the way through Inductor: the numbers are eager PyTorch's."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import remat
from remat.integrations import workarounds
from remat.integrations.masks import masks_from_bytes, masks_to_bytes

T = torch.Tensor


class Convolution(nn.Module):
    """Draws on a value that Inductor lays out with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.2)

    def forward(self, x: T) -> T:
        return self.drop(self.conv(x).relu()).square().sum()


def stepped(step: Any, model: nn.Module, x: T) -> list[T]:
    torch.manual_seed(1)
    loss = step(x)
    loss.backward()
    return [loss, torch.rand(2), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_draws_are_for_the_same_elements_as_in_eager_pytorch() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Convolution(), torch.randn(2, 8, 16, 16)
    ours = copy.deepcopy(model)
    options = {"budget": 0.0, "fallback_random": True}
    found = stepped(torch.compile(ours, backend="remat", options=options), ours, x)
    # Inductor runs an operator of higher order for each of PyTorch's own draws.
    assert remat.plans()[-1].planned_peak_bytes, "the peak is that of the compiled code"
    for a, b in zip(found, stepped(model, model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def drawn_twice(mode: FakeTensorMode) -> tuple[fx.GraphModule, T]:
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
        gm, given = drawn_twice(mode)
        run = workarounds.compile_graph(gm, [given])
    x = torch.randn(8, 16)
    torch.manual_seed(5)
    one, two = run([x.clone()])
    torch.manual_seed(5)
    mask = torch.rand_like(x)
    torch.testing.assert_close(one, x * mask)
    torch.testing.assert_close(two, x.sin() * mask)


class Gated(nn.Module):
    """Keeps what a comparison says, which is dear to make again and one byte an element to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 64).requires_grad_(False)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: T) -> T:
        return torch.where(self.gate(x) > 0, self.layer(x), 0.0).sum()


def test_masks_are_held_as_bytes_and_change_nothing() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(128, 64)
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend="remat", options={"budget": 1.0})
    held: list[T] = []

    def pack(value: T) -> T:
        held.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        compiled(x)
    found = stepped(compiled, ours, x)
    for a, b in zip(found, stepped(model, model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    plan = remat.plans()[-1]
    kinds = {n.name: n.meta["val"].dtype for n in plan.forward.graph.nodes if n.name in plan.saved}
    masks = [name for name, dtype in kinds.items() if dtype is torch.bool]
    assert masks, "the plan keeps masks, else this shows nothing"
    assert sum(v.dtype is torch.uint8 for v in held) == len(masks)
    assert not any(v.dtype is torch.bool for v in held)
    assert plan.saved_bytes == plan.planned_saved_bytes


def test_what_the_step_returns_stays_boolean() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    own, mask = (
        graph.call_function(op, (x, 0))
        for op in (torch.ops.aten.le.Scalar, torch.ops.aten.gt.Scalar)
    )
    for node in (own, mask):
        node.meta["val"] = torch.empty(4, dtype=torch.bool)
    graph.output((own, own, mask))
    assert masks_to_bytes(graph, 1) == {mask.name}
    first, again, packed = graph.output_node().args[0]  # type: ignore[misc]
    assert first is again is own
    assert packed.meta["val"].dtype is torch.uint8  # type: ignore[union-attr]

    backward = fx.Graph()
    given = backward.placeholder(mask.name)
    given.meta["val"] = torch.empty(4, dtype=torch.bool)
    backward.output((backward.call_function(torch.ops.aten.logical_not.default, (given,)),))
    (taken,) = masks_from_bytes(backward, [torch.empty(4, dtype=torch.bool)], [mask.name])
    assert taken.dtype is torch.uint8
    module = fx.GraphModule({}, backward)
    assert module(torch.tensor([0, 1, 1, 0], dtype=torch.uint8))[0].tolist() == [
        True,
        False,
        False,
        True,
    ]
