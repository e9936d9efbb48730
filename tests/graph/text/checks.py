"""What a graph that was read back from its text must share with the original."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import remat
from remat.graph.capture.source import source_line
from remat.graph.joint import output_node
from remat.graph.memory.storages import hint, storage_key
from remat.graph.text import parse_graph, parse_joint, print_graph, print_joint

#: Metadata that steers planning and partitioning.
STEERING = (
    "desc",
    "recompute",
    "partitioner_tag",
    "has_backward_hook",
    "saved_tensor_with_no_vc_check",
)
FIGURES = (
    "saved",
    "snapshots",
    "recomputed",
    "saved_bytes",
    "peak_bytes",
    "recompute_cost",
    "recompute_bound",
)


def read_back(joint: remat.JointGraph) -> remat.JointGraph:
    """Writes a joint graph, reads it, and compares all that a plan could depend on."""
    text = print_joint(joint)
    parsed = parse_joint(text)
    assert print_joint(parsed) == text
    assert parsed.fingerprint == joint.fingerprint
    assert parsed.name == joint.name
    assert parsed.lower == joint.lower
    assert parsed.num_fwd_outputs == joint.num_fwd_outputs
    assert parsed.static_inputs == joint.static_inputs
    assert parsed.received == joint.received
    assert parsed.shared == joint.shared
    assert (parsed.returned, parsed.runs) == (joint.returned, joint.runs)
    assert parsed.turns == joint.turns
    assert_same_graph(parsed.graph_module, joint.graph_module)
    for path, module in joint.graph_module.named_modules():
        if path and isinstance(module, fx.GraphModule):
            assert_same_graph(parsed.graph_module.get_submodule(path), module)
    return parsed


def read_back_half(module: fx.GraphModule) -> fx.GraphModule:
    """Writes one half of a plan, reads it, and compares."""
    text = print_graph(module)
    parsed = parse_graph(text)
    assert print_graph(parsed) == text
    assert_same_graph(parsed, module)
    return parsed


def without_sources(text: str) -> str:
    """The text of a graph without the user's lines at the ends of its lines."""
    return re.sub(r"  # .*$", "", text, flags=re.MULTILINE)


def assert_same_graph(parsed: fx.GraphModule, original: fx.GraphModule) -> None:
    mine, theirs = list(parsed.graph.nodes), list(original.graph.nodes)
    assert [n.name for n in mine] == [n.name for n in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert (a.op, a.target) == (b.op, b.target) or a.op == "output"
        assert repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))
        assert ("val" in a.meta) == ("val" in b.meta), a.name
        assert described(a.meta.get("val")) == described(b.meta.get("val")), a.name
        if a.op != "output":
            assert source_line(a) == source_line(b).strip()
            for key in STEERING:
                assert (a.meta.get(key) or None) == (b.meta.get(key) or None), (a.name, key)
    assert regions(parsed) == regions(original)
    assert descs(parsed) == descs(original)
    assert shared(parsed) == shared(original)


def regions(module: fx.GraphModule) -> list[int | None]:
    """The checkpointed region of each node, counted from 0; a process counts on from graph to graph."""
    met = [node.meta.get("ac_graph_id") for node in module.graph.nodes]
    order = sorted({region for region in met if region is not None})
    return [None if region is None else order.index(region) for region in met]


def descs(module: fx.GraphModule) -> list[Any]:
    return [
        d for d in pytree.tree_leaves(output_node(module.graph).meta.get("desc")) if d is not None
    ]


def described(value: Any) -> Any:
    """A value in plain terms; symbolic numbers with what they come to in the run that was traced."""
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        memory = value.untyped_storage().nbytes() if strided else 0
        strides = value.stride() if strided else ()
        offset = value.storage_offset() if strided else 0
        kind = (value.dtype, value.device, value.layout)
        return (*kind, str(value.shape), str(strides), str(offset), hint(memory))
    if isinstance(value, (tuple, list)):
        return tuple(map(described, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), str(value), value.node.hint)
    return (type(value).__name__, repr(value) if isinstance(value, (int, float, bool)) else "")


def shared(module: fx.GraphModule) -> list[list[tuple[str, int]]]:
    """Which tensors share memory: groups of (node, number of the tensor in its value)."""
    groups: dict[int, list[tuple[str, int]]] = {}
    for node in module.graph.nodes:
        for k, leaf in enumerate(pytree.tree_leaves(node.meta.get("val"))):
            key = storage_key(leaf)
            if key is not None:
                groups.setdefault(key, []).append((node.name, k))
    return list(groups.values())


def assert_read_back(joint: remat.JointGraph, budget: float) -> None:
    """Reads a joint graph and both modules of its plan back."""
    plan = assert_same_plans(read_back(joint), joint, budget)
    read_back_half(plan.forward)
    read_back_half(plan.backward)


def assert_same_plans(
    parsed: remat.JointGraph, joint: remat.JointGraph, budget: float
) -> remat.Plan:
    """Plans both graphs, compares what is decided, and gives a plan."""
    mine, theirs = remat.plan(parsed, budget), remat.plan(joint, budget)
    for figure in FIGURES:
        assert getattr(mine, figure) == getattr(theirs, figure), figure
    return mine
