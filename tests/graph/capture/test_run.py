"""Captures that take their branches from a run: the same graphs that `torch.compile` makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

import remat
from remat.errors import CaptureError

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    # Dynamo looks at .grad of what one graph hands to the next.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]

T = torch.Tensor


class Net(nn.Module):
    """A model whose forward is the function that it is given."""

    def __init__(self, program: Callable[[Net, T], T]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.program = program

    def forward(self, x: T) -> T:
        return self.program(self, x)


def branches(net: Net, x: T) -> T:
    h = net.one(x).sin()
    return net.two(h).cos().sum() if h.sum() > 0 else h.exp().sum()


def _tried(net: Net, h: T) -> T:
    h = net.one(h).tanh()
    return h * 2 if h.sum() > 100 else h


def loops(net: Net, x: T) -> T:
    for _ in range(3):
        x = _tried(net, x)
    return net.two(x) * x.sum().item()


def counts(net: Net, x: T) -> T:
    h = torch.dropout(net.one(x), 0.5, True)
    net.count.add_(1)
    return net.two(h) if net.count > 0 else h


def compiled_graphs(net: Net, x: T) -> list[list[str]]:
    """The calls of each joint graph that `torch.compile` makes of a model."""
    found: list[list[str]] = []

    def split(graph: torch.fx.GraphModule, inputs: object, **how: object) -> object:
        found.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return default_partition(graph, inputs, **how)  # type: ignore[arg-type]

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=split,
        keep_inference_input_mutations=True,
    )
    torch.compile(net, backend=backend, dynamic=False)(x)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("program", [loops, counts])
@pytest.mark.slow
def test_the_graphs_are_those_of_torch_compile(program: Callable[[Net, T], T]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    expected = compiled_graphs(Net(program), x.clone())
    net, before = Net(program), x.clone()
    state = torch.get_rng_state()
    joints = remat.capture(net, (x,), lower="eager", fullgraph=False, run=True)
    calls = [[str(n.target) for n in j.graph.nodes if n.op == "call_function"] for j in joints]
    assert calls == expected
    assert len(calls) >= 2
    assert joints[1].received, "what one graph hands to the next"
    assert all(j.graph_module is not None and remat.plan(j, 0.5).forward for j in joints)
    # Nothing is left behind: buffers, inputs, gradients and the generator are as they were.
    assert net.count == 0
    assert torch.equal(x, before)
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_lie_in_memory_as_they_do_in_the_compiled_step() -> None:
    """Else a plan of the graphs has other figures than the step, which refuses it."""

    def step(weight: T, x: T, tail: T) -> T:
        h = weight.sin() * tail
        torch._dynamo.graph_break()
        return h.exp().sum() + x.sum()

    x = torch.randn(9)
    inputs = (torch.randn(8, requires_grad=True), x, x[1:])
    graphs = remat.capture(step, inputs, lower="eager", fullgraph=False, run=True)
    options = {"plan": remat.plan(graphs, 0.0), "lower": "eager"}
    torch.compile(step, backend="remat", options=options)(*inputs).backward()
    assert inputs[0].grad is not None


def test_fake_numbers_decide_nothing() -> None:
    with pytest.raises(CaptureError) as caught:
        remat.capture(Net(branches), (torch.ones(4, 8),), lower="eager", fullgraph=False)
    told = str(caught.value)
    assert "decides by the numbers in a tensor at " in told
    assert "test_run.py:" in told
    assert "fullgraph=False and run=True" in told


def test_what_cannot_be_run() -> None:
    x = torch.ones(4, 8)
    with torch.device("meta"):
        meta = Net(branches)
    with pytest.raises(CaptureError, match="5 of its 6 tensors have no numbers"):
        remat.capture(meta, (x,), fullgraph=False, run=True)
    with pytest.raises(CaptureError, match="pass fullgraph=False with run=True"):
        remat.capture(Net(branches), (x,), run=True)  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match="runs the model where it lies"):
        remat.capture(Net(branches), (x,), fullgraph=False, run=True, device="meta")
    with pytest.raises(CaptureError, match="nor is it compiled where a graph breaks inside"):
        remat.capture(Net(breaks_in_a_loop), (x,), fullgraph=False, run=True)


def breaks_in_a_loop(net: Net, x: T) -> T:
    for k in range(3):
        x = net.one(x).tanh()
        if x.mean() > k:
            break
    return net.two(x)


def test_what_a_run_drops_is_dropped() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[T]] = []

    @torch.compiler.disable
    def note(value: T) -> None:
        seen.append(weakref.ref(value.untyped_storage()))
        alive.append(sum(ref() is not None for ref in seen))

    def layer(net: Net, x: T) -> T:
        return net.one(x).sin()

    def chain(net: Net, x: T) -> T:
        for _ in range(4):  # a graph break in a loop: each layer is a graph
            x = layer(net, x)
            note(x)
        return x.sum()

    graphs = remat.capture(Net(chain), (torch.ones(2, 8),), fullgraph=False, run=True)
    assert sum(graph.runs for graph in graphs) == 4
    assert len(alive) == 4
    assert max(alive) <= 2
