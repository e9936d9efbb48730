"""Several devices in one graph, and the generator that each of them draws from.

A build of PyTorch for the CPU makes fake CUDA tensors, but cannot differentiate them: such graphs are
written by hand here and planned, not run.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.graph import ops
from tests.hard.steps import check, compiled, pair

T = torch.Tensor


def test_shapes_without_memory() -> None:
    def f(x: T, w: T, shape: T) -> Any:
        meta = torch.nn.functional.dropout(torch.empty(6, 8, device="meta"), 0.5)
        return torch.tanh(x @ w).exp() * meta.shape[0], shape.sin() * 2

    check(lambda: (f, (*pair(), torch.empty(6, 8, device="meta"))))


def test_noise_without_memory_is_not_replayed() -> None:
    """There is no generator whose state could be saved."""

    def f(x: T, w: T) -> T:
        return torch.tanh(x @ w).exp() * torch.nn.functional.dropout(x, 0.5)

    args = [torch.empty(6, 6, device="meta", requires_grad=True) for _ in range(2)]
    compiled(f, budget=0)(*args).sum().backward()
    assert all(x.grad is not None and x.grad.is_meta for x in args)
    assert not any("native_dropout" in n for n in remat.plans()[-1].recomputed)


def drawing(*devices: str, tag: CheckpointPolicy | None = None) -> remat.JointGraph:
    """Dropout of a sine on each device, of which backward reads mask and result."""
    graph, call = fx.Graph(), torch.ops.aten
    forward: list[fx.Node] = []
    inputs: list[fx.Node] = []
    with FakeTensorMode():
        for k, device in enumerate(devices):
            inputs.append(_given(graph, f"primals_{k + 1}", torch.empty(64, 64, device=device)))
        tangents = [
            _given(graph, f"tangents_{k + 1}", torch.empty(64, 64, device=device))
            for k, device in enumerate(devices)
        ]
        outputs, gradients, masks = [], [], []
        for x in inputs:
            drop = _called(
                graph, call.native_dropout.default, _called(graph, call.sin.default, x), 0.5, True
            )
            dropped, mask = (_called(graph, operator.getitem, drop, k) for k in range(2))
            forward += [drop, dropped, mask]
            outputs.append(
                _called(graph, call.exp.default, _called(graph, call.cos.default, dropped))
            )
            masks.append((dropped, mask))
        for (dropped, mask), g in zip(masks, tangents, strict=True):
            local = _called(graph, call.sin.default, dropped)
            gradients.append(
                _called(graph, call.mul.Tensor, _called(graph, call.mul.Tensor, g, local), mask)
            )
    graph.output((*outputs, *gradients))
    for n in forward:
        if tag is not None:
            n.meta["recompute"] = tag
    return remat.JointGraph(
        graph_module=fx.GraphModule({}, graph), num_fwd_outputs=len(devices), name="drawing"
    )


def _given(graph: fx.Graph, name: str, value: T) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _called(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    node.meta["val"] = target(*values)
    return node


def drawn_again(*devices: str, tag: CheckpointPolicy | None = None) -> set[str]:
    """Devices on which dropout is replayed in backward under the least budget."""
    joint = drawing(*devices, tag=tag)
    with config.patch(graphsafe_rng_functionalization=False):  # it needs the devices themselves
        plan = remat.plan(joint, 0)
    nodes = {n.name: n for n in joint.graph.nodes}
    names = [n for n in plan.recomputed if n.startswith("native_dropout")]
    assert all(ops.is_random(nodes[n]) for n in names)
    return {str(nodes[n].args[0].meta["val"].device) for n in names}  # type: ignore[union-attr]


def test_one_generator_is_replayed() -> None:
    assert drawn_again("cpu") == {"cpu"}
    assert drawn_again("cuda:0") == {"cuda:0"}
    assert drawn_again("cpu", "cuda:0") == {"cpu", "cuda:0"}


def test_generators_of_several_accelerators_are_not() -> None:
    """PyTorch would save and restore the state of the current device's for all of them."""
    assert drawn_again("cuda:0", "cuda:1") == set()
    assert drawn_again("cuda:0", "cpu", "cuda:1") == {"cpu"}


def test_not_even_where_a_tag_asks_for_it() -> None:
    tag = CheckpointPolicy.MUST_RECOMPUTE
    assert drawn_again("cuda:0", tag=tag) == {"cuda:0"}
    assert drawn_again("cuda:0", "cuda:1", tag=tag) == set()


def test_a_device_whose_generator_cannot_be_saved() -> None:
    assert drawn_again("mps") == set()
