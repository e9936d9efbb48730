"""Steps whose saved tensors pass through hooks, checked in every way, and shown."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import remat
from remat.graph.joint import JointGraph, output_node
from remat.graph.memory.storages import storage_key
from remat.graph.verify import Split, verify
from remat.passes.core.state import PassResult
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.planning.pipelines import prepare, split
from tests.graphs import placeholders, weight

Hooks = remat.SavedTensorHooks


def through(joint: JointGraph, hooks: Any) -> PassResult:
    """Both halves of a step with its saved tensors passed through hooks, checked in every way."""
    hooks = hooks if isinstance(hooks, PackSaved) else PackSaved.of(Hooks.of(hooks))
    result = hooks.run(split(prepare(joint)))
    assert result.forward is not None
    assert result.backward is not None
    result.forward.graph.lint()
    result.backward.graph.lint()
    verify(Split(joint=joint, forward=result.forward, backward=result.backward))
    assert_handed_in_order(result)
    assert_views_look_at_their_base(result.backward)
    return result


def assert_handed_in_order(result: PassResult) -> None:
    """Forward ends in tensors, then sizes; backward begins with sizes, then tensors, by name."""
    assert result.forward is not None
    assert result.backward is not None
    own = result.joint.num_fwd_outputs
    out = output_node(result.forward.graph)
    handed: list[Any] = list(out.args[0])[own:]  # type: ignore[arg-type]
    tensors = [v.name for v in handed if isinstance(v.meta["val"], torch.Tensor)]
    sizes = [v.name for v in handed if not isinstance(v.meta["val"], torch.Tensor)]
    assert [v.name for v in handed] == tensors + sizes
    count = len(handed)
    assert placeholders(result.backward)[:count] == sizes + tensors
    assert [d.idx for d in out.meta["desc"][own:]] == list(range(count))
    assert len(out.meta["output_stack_traces"]) == own + count
    values = {n.name: n.meta["val"] for n in result.backward.graph.nodes if "val" in n.meta}
    for v in handed:
        assert storage_key(values[v.name]) == storage_key(v.meta["val"])


def assert_views_look_at_their_base(module: fx.GraphModule) -> None:
    for n in module.graph.nodes:
        if getattr(n.target, "overloadpacket", None) in VIEWS:
            assert storage_key(n.meta["val"]) == storage_key(n.args[0].meta["val"]), n.name


VIEWS = (torch.ops.aten.t, torch.ops.aten.detach, torch.ops.aten.view, torch.ops.aten.permute)


def shown(module: fx.GraphModule | None) -> str:
    """A module, a line for each node."""
    assert module is not None
    lines = []
    for n in module.graph.nodes:
        if n.op == "output":
            lines.append(f"return {', '.join(map(str, n.args[0]))}")
        elif n.op == "placeholder":
            lines.append(f"{n.name}: {kind(n.meta['val'])}")
        else:
            args = ", ".join(map(str, [*n.args, *(f"{k}={v}" for k, v in n.kwargs.items())]))
            lines.append(f"{n.name}: {kind(n.meta['val'])} = {n.target}({args})")
    return "\n".join(lines)


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin().exp().sum()


ARGS = (weight(4, 6), weight(6, 8))
CAST = (lambda x: x.to(torch.bfloat16), lambda p: p.to(torch.float32))


def names_handed(result: PassResult) -> list[str]:
    assert result.forward is not None
    out: Any = output_node(result.forward.graph).args[0]
    return [v.name for v in out[result.joint.num_fwd_outputs :]]
