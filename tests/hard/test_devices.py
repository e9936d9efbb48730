"""Several devices in one graph, and the generator that each of them draws from.

A build of PyTorch for the CPU makes fake CUDA tensors, but cannot differentiate them: such graphs are
written by hand here and planned, not run.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
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


MUST = CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(
    ("devices", "tag", "again"),
    [
        (["cpu"], None, ["cpu"]),
        (["cuda:0"], None, ["cuda:0"]),
        (["cpu", "cuda:0"], None, ["cpu", "cuda:0"]),
        # PyTorch would save and restore the state of the current accelerator for all of them.
        (["cuda:0", "cuda:1"], None, []),
        (["cuda:0", "cpu", "cuda:1"], None, ["cpu"]),
        # Not even if a tag asks for it.
        (["cuda:0"], MUST, ["cuda:0"]),
        (["cuda:0", "cuda:1"], MUST, []),
        # The state of this device's generator cannot be saved.
        (["mps"], None, []),
    ],
    ids=str,
)
def test_draws_are_replayed_on_devices_with_one_generator(
    devices: list[str], tag: CheckpointPolicy | None, again: list[str]
) -> None:
    assert drawn_again(*devices, tag=tag) == set(again)
