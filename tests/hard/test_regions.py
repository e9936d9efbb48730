"""Nested compile regions (``invoke_subgraph``): split once, called many times."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from remat.graph import ops
from remat.graph.capture.regions import separate_calls
from remat.graph.joint import output_node
from remat.graph.memory.storages import storage_key
from tests.graphs import joint_of
from tests.hard.steps import check, drawn, pair

T = torch.Tensor


@torch.compiler.nested_compile_region
def block(x: T, w: T) -> T:
    return torch.tanh(x @ w).exp().sin()


@torch.compiler.nested_compile_region
def dropping(x: T, w: T) -> T:
    return F.dropout(torch.tanh(x @ w), 0.5).sin()


@torch.compiler.nested_compile_region
def checkpointing(x: T, w: T) -> T:
    def inner(a: T) -> T:
        return torch.tanh(a @ w).exp()

    return checkpoint(inner, x, use_reentrant=False).sin()


def stacked(x: T, w: T) -> T:
    for _ in range(3):
        x = block(x, w) + x
    return x.cos()


class Layer(nn.Module):
    """A region whose result is also what its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @torch.compiler.nested_compile_region
    def forward(self, x: T) -> T:
        return torch.relu(self.linear(x)).exp()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: T) -> T:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x


def net() -> Any:
    torch.manual_seed(1)
    return Net(), (drawn(6, 8),)


def test_functions() -> None:
    least, some, full = check(lambda: (stacked, pair()), budgets=(0, 0.3, 1), captured=True)
    assert (least.saved_bytes, len(least.snapshots)) == (0, 0)
    assert 0 < some.saved_bytes < full.saved_bytes
    assert any(n.startswith("invoke_subgraph") for n in least.recomputed)
    assert not any(n.startswith("invoke_subgraph") for n in full.recomputed)
    target = torch.ops.higher_order.invoke_subgraph
    for plan in (least, some, full):  # PyTorch splits a region once, and so do we
        calls = plan.backward.graph.find_nodes(op="call_function", target=target)
        bodies = [n.args[0].target for n in calls if "bw" in n.args[1]]
        assert (len(bodies), len(set(bodies))) == (3, 1)


def test_modules() -> None:
    check(net, captured=True)


# PyTorch 2.15 says that two regions with other tangents get two backward graphs.
@pytest.mark.filterwarnings("ignore:invoke_subgraph traced multiple backward graphs:UserWarning")
def test_symbolic_sizes() -> None:
    check(lambda: (stacked, pair()), budgets=(0,), dynamic=True)


def test_random_numbers_inside_are_not_drawn_again() -> None:
    def f(x: T, w: T) -> T:
        for _ in range(2):
            x = dropping(x, w) + x
        return x.cos()

    for plan in check(lambda: (f, pair())):
        assert not any(n.startswith("invoke_subgraph") for n in plan.recomputed)


def test_checkpoints_inside_and_around() -> None:
    def f(x: T, w: T) -> T:
        x = checkpoint(lambda a: block(a, w).sin(), x, use_reentrant=False)
        return checkpointing(x, w).cos()

    check(lambda: (f, pair()))


def test_under_inductor() -> None:
    """PyTorch 2.13 by itself computes wrong gradients here: it reuses memory that regions share."""
    check(net, lower="inductor")


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(stacked, *pair())


def test_a_capture_is_of_the_graph_around_the_regions(joint: remat.JointGraph) -> None:
    called = [n for n in joint.graph.nodes if "invoke_subgraph" in str(n.target)]
    assert len(called) == 6, "three calls forward, three backward"
    assert all(ops.subgraphs(n) for n in called)


def test_a_budget_on_saved_bytes_is_for_the_whole_step(joint: remat.JointGraph) -> None:
    assert 0 < remat.plan(joint, remat.Saved(400)).saved_bytes <= 400


def test_a_region_costs_what_is_in_it(joint: remat.JointGraph) -> None:
    plan = remat.plan(joint, 0, cost="flops")
    assert plan.recompute_cost >= 3 * 2 * 6 * 8 * 8, "three products"


def test_every_call_has_memory_of_its_own(joint: remat.JointGraph) -> None:
    joint = joint.copy()
    before = results(joint.graph)
    assert len({storage_key(v) for v in before}) < len(before), "PyTorch shares them among calls"
    assert separate_calls(joint.graph) == 6
    joint.graph.lint()
    inputs = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    after = results(joint.graph)
    assert len({storage_key(v) for v in after}) == len(after)
    assert {storage_key(v) for v in after}.isdisjoint(map(storage_key, inputs))


def results(graph: fx.Graph) -> list[torch.Tensor]:
    """What regions return and somebody reads."""
    elements = graph.find_nodes(op="call_function", target=operator.getitem)
    return [n.meta["val"] for n in elements if n.users]


def test_what_a_region_hands_back_is_taken_outside_of_it() -> None:
    """Inputs, views of them, and other results: a call says nothing of what its results share."""

    def region(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = x @ w
        return h, x, x.t(), h.view(-1), h

    inner = torch.fx.experimental.proxy_tensor.make_fx(region, tracing_mode="fake")(*pair())
    graph = fx.Graph()
    x, w = (graph.placeholder(n) for n in "xw")
    values = [n.meta["val"] for n in inner.graph.nodes if n.op == "placeholder"]
    x.meta["val"], w.meta["val"] = (v.clone() for v in values)
    call = graph.call_function(
        torch.ops.higher_order.invoke_subgraph, (graph.get_attr("region"), "fw", x, w)
    )
    returned: Any = output_node(inner.graph).args[0]
    call.meta["val"] = tuple(n.meta["val"] for n in returned)
    elements = [graph.call_function(operator.getitem, (call, k)) for k in reversed(range(5))][::-1]
    graph.output(tuple(elements))
    module = fx.GraphModule({"region": inner}, graph)
    separate_calls(module.graph)
    module.graph.lint()
    h, same, turned, flat, again = output_node(module.graph).args[0]  # type: ignore[misc, union-attr]
    assert (same, again) == (x, h)
    assert (turned.target, turned.args[0]) == (torch.ops.aten.t.default, x)  # type: ignore[union-attr]
    assert (flat.target, flat.args[0]) == (torch.ops.aten.view.default, h)  # type: ignore[union-attr]
    assert storage_key(turned.meta["val"]) == storage_key(x.meta["val"])  # type: ignore[union-attr]
    assert storage_key(flat.meta["val"]) == storage_key(h.meta["val"])  # type: ignore[union-attr]
    x_value, w_value = pair()
    for mine, theirs in zip(module(x_value, w_value), region(x_value, w_value), strict=True):
        assert torch.equal(mine, theirs)
