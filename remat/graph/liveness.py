"""Bytes alive at once while forward and backward run, by walking both graphs once.

Eager lowering without reuse of memory in place: a value is allocated where its node stands and
freed after its last use. Inputs, parameters, forward outputs and gradients live to the end of the
step; saved tensors and tangents end at their last use in backward, as AOTAutograd frees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat.graph.joint import Role, output_node, role_of
from remat.graph.storages import storage_bytes, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment with the most bytes alive.

    Attributes:
        nbytes: bytes alive then, inputs and parameters included.
        node: the node running then.
        in_backward: whether that is in backward.
    """

    nbytes: int
    node: str
    in_backward: bool


def simulate_peak(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> Peak:
    """Simulates the memory of one step over a pair of modules that carry fake values."""
    inputs = _sizes(n for n in forward.graph.nodes if n.op == "placeholder")
    values = pytree.arg_tree_leaves(*output_node(forward.graph).args)
    outputs = _sizes(v for v in values[:num_fwd_outputs] if isinstance(v, fx.Node))
    handed = _sizes(v for v in values[num_fwd_outputs:] if isinstance(v, fx.Node))
    first = _walk(forward, resident=inputs, initial={}, pinned={*outputs, *handed})
    initial = _sizes(
        n
        for n in backward.graph.nodes
        if n.op == "placeholder" and role_of(n) in (Role.PRIMAL, Role.TANGENT)
    )
    gradients = pytree.arg_tree_leaves(*output_node(backward.graph).args)
    second = _walk(
        backward,
        resident=inputs | outputs,
        initial={k: b for k, b in initial.items() if k not in inputs and k not in outputs},
        pinned=set(_sizes(v for v in gradients if isinstance(v, fx.Node))),
    )
    if second[0] > first[0]:
        return Peak(nbytes=second[0], node=second[1], in_backward=True)
    return Peak(nbytes=first[0], node=first[1], in_backward=False)


def _walk(
    module: fx.GraphModule, *, resident: dict[int, int], initial: dict[int, int], pinned: set[int]
) -> tuple[int, str]:
    """Most bytes alive while a graph runs, and the node that runs then."""
    made: dict[fx.Node, dict[int, int]] = {n: _sizes((n,)) for n in module.graph.nodes}
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for read in (node, *node.all_input_nodes):
            for key in made[read]:
                last[key] = i
    # What backward never reads is freed before it starts.
    alive = {k: b for k, b in initial.items() if k in last or k in pinned}
    ends: dict[int, list[int]] = {}
    for key, i in last.items():
        if key not in pinned:
            ends.setdefault(i, []).append(key)
    current = sum(resident.values()) + sum(alive.values())
    most, where = current, nodes[0].name if nodes else ""
    for i, node in enumerate(nodes):
        for key, nbytes in made[node].items():
            if key not in resident and key not in alive:
                alive[key] = nbytes
                current += nbytes
        if current > most:
            most, where = current, node.name
        for key in ends.get(i, ()):
            current -= alive.pop(key, 0)
    return most, where


def _sizes(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Storages of the values of nodes, with their bytes."""
    found: dict[int, int] = {}
    for node in nodes:
        value = node.meta.get("val")
        for tensor in (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                key = storage_key(tensor)
                found[id(tensor) if key is None else key] = storage_bytes(tensor)
    return found


def saved_storages(
    forward: fx.GraphModule, num_fwd_outputs: int, *, count_outputs: bool = False
) -> dict[int, int]:
    """Distinct storages that forward hands to backward beyond inputs and outputs, with their bytes."""
    from remat.graph.storages import is_input_mutation

    out = output_node(forward.graph)
    values = pytree.arg_tree_leaves(*out.args)
    descs = pytree.arg_tree_leaves(out.meta.get("desc", [None] * len(values)))
    free = _sizes(n for n in forward.graph.nodes if n.op == "placeholder")
    if not count_outputs:
        free |= _sizes(
            v
            for v, d in zip(values[:num_fwd_outputs], descs, strict=False)
            if isinstance(v, fx.Node) and not is_input_mutation(d)
        )
    handed = _sizes(v for v in values[num_fwd_outputs:] if isinstance(v, fx.Node))
    return {k: b for k, b in handed.items() if k not in free}
