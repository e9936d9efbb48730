"""Common subexpression elimination on joint graphs (SPEC A2)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from remat.graph import ops
from remat.graph.fake import refresh
from remat.graph.joint import output_node
from remat.graph.storages import storage_key
from remat.passes.base import Pass, PassResult, Stage, State


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Merges calls of one operator with the same arguments.

    Never merged: random, effectful, mutating or uninitialised results; aliases of an output; calls
    with a mutation between them, with different recompute tags, or over unbacked symbols. Arguments
    are compared with their types and bits: ``1``, ``1.0`` and ``True`` differ, and so do ``0.0``
    and ``-0.0``; NaN equals itself.
    """

    name: ClassVar[str] = "cse"
    stage: ClassVar[Stage] = Stage.JOINT
    not_after: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("min-cut", "knapsack", "solve-graph", "partition"),
        "it would merge what is to be recomputed with what it is recomputed from, which undoes the "
        "rematerialisation",
    )
    summary: ClassVar[str] = "merge calls of one operator with the same arguments"

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            merged = merge(state.joint.graph)
            edit.modified = merged > 0
        return edit.result(f"{merged} nodes merged", merged=merged)


def merge(graph: fx.Graph) -> int:
    """Merges common subexpressions of a graph in place and returns how many nodes went."""
    returned = {
        key
        for node in output_node(graph).all_input_nodes
        if (key := storage_key(node.meta.get("val"))) is not None
    }
    number: dict[fx.Node, int] = {}
    seen: dict[Any, fx.Node] = {}
    gone: set[int] = set()  # storages of nodes that were merged away
    dead: list[fx.Node] = []
    mutations = 0
    for i, node in enumerate(graph.nodes):
        number[node] = i
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        if gone and any(storage_key(v) in gone for v in _leaves(value)):
            refresh(node)
        if ops.is_mutating(node):
            mutations += 1
        if not _is_mergeable(node, value, returned):
            continue
        key = _key(node, number, mutations)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        gone |= {k for v in _leaves(value) if (k := storage_key(v)) is not None} - {
            storage_key(v) for v in _leaves(first.meta.get("val"))
        }
        node.replace_all_uses_with(first)
        dead.append(node)
    for node in reversed(dead):
        graph.erase_node(node)
    return len(dead)


def _is_mergeable(node: fx.Node, value: Any, returned: set[int]) -> bool:
    if ops.is_random(node) or ops.is_effectful(node) or ops.is_mutating(node):
        return False
    if ops.is_uninitialised(node) or ops.is_collective(node):
        return False
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor) and storage_key(leaf) in returned:
            return False
        if _is_symbolic(leaf) and free_unbacked_symbols(leaf):
            return False
    return True


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not all(type(s) is int for s in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _key(node: fx.Node, number: dict[fx.Node, int], mutations: int) -> Any:
    """What two calls must share to be one, or None where an argument cannot be compared."""
    meta = node.meta
    key = (
        node.target,
        _describe(node.args, number),
        _describe(node.kwargs, number) if node.kwargs else None,
        meta.get("recompute"),
        meta.get("ac_graph_id"),
        mutations,
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _describe(x: Any, number: dict[fx.Node, int]) -> Any:
    """An argument as a value that is equal only to what is the same to the bit."""
    if isinstance(x, fx.Node):
        return ("node", number[x])
    if isinstance(x, (tuple, list)):
        return (type(x), *(_describe(y, number) for y in x))
    if isinstance(x, dict):
        return ("dict", *((k, _describe(v, number)) for k, v in x.items()))
    if isinstance(x, float):
        return ("float", struct.pack("<d", x))
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("symbol", str(x.node.expr))
    return (type(x), x)
