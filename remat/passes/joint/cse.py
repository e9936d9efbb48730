"""Common subexpression elimination on joint graphs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from remat.graph import ops
from remat.graph.capture.fake import refresh_views
from remat.graph.index import are_plain, inputs_of
from remat.graph.joint import output_node
from remat.graph.memory.storages import SYMBOLIC, Memories, leaves_of
from remat.graph.memory.writes import written_by
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Merge calls of the same operator with the same arguments.

    Calls of an operator are never merged in these cases:

    - the call draws random numbers, has an effect, mutates an argument, is a collective, or returns
      uninitialised memory;
    - the operator comes from outside PyTorch and is not declared pure (`remat.declare_pure`);
    - the result shares memory with an output of the graph, or is overwritten, or has a size that depends on data;
    - a mutation runs between the calls, or their recompute tags differ.

    Arguments are compared by type and bit for bit. The arguments ``1``, ``1.0`` and ``True`` differ, and so do ``0.0``
    and ``-0.0``. NaN equals NaN.
    """

    name: ClassVar[str] = "cse"
    stage: ClassVar[Stage] = Stage.JOINT
    not_after: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("min-cut", "knapsack", "solve-graph", "partition"),
        "it would merge what is to be recomputed with what it is recomputed from, which undoes the "
        "rematerialisation",
    )

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            merged = merge(state.joint.graph, state.joint.memories)
            return edit.result(f"{merged} nodes merged", merged=merged)


def merge(graph: fx.Graph, memories: Memories | None = None) -> int:
    """Merge common subexpressions of a graph in place.

    Args:
        graph: the graph.
        memories: cache of the storage of each value; None: use a new cache.

    Returns:
        Number of erased nodes.
    """
    storage = (memories or Memories()).key
    out = output_node(graph)
    nodes = list(graph.nodes)
    plains = are_plain(nodes)
    written = [
        w for n, plain in zip(nodes, plains, strict=True) if not plain for w in written_by(n)
    ]
    # Views of one input share its memory, so they may be merged although the input is overwritten.
    inputs = {storage(n.meta.get("val")) for n in graph.find_nodes(op="placeholder")}
    overwritten = {storage(w.meta.get("val")) for w in written} - inputs
    # Storages that no other call may share.
    own = {k for n in inputs_of(out) if (k := storage(n.meta.get("val"))) is not None} | overwritten
    seen: dict[Any, fx.Node] = {}
    gone: set[int] = set()  # storages of nodes that were merged away
    merged_into: set[fx.Node] = set()  # nodes with which other nodes were merged
    dead: list[fx.Node] = []
    mutations = 0
    for node, plain in zip(nodes, plains, strict=True):
        if node.op != "call_function":
            continue
        if not plain:
            # The count is a part of the key, so that no calls are merged across a mutation.
            mutations += ops.is_mutating(node)
            if _has_effects(node):
                continue
        try:
            key = _key(node, mutations)
            first = seen.setdefault(key, node)
        except TypeError:  # an argument that cannot be compared
            continue
        if first is node:
            continue
        mine, others = (
            {k for v in _leaves(n) if (k := storage(v)) is not None} for n in (node, first)
        )
        if not others.isdisjoint(own) or _is_unbacked(first):
            # No call can be merged with `first`, but a later call may be merged with this node.
            seen[key] = node
        elif mine.isdisjoint(own) and not _is_unbacked(node):
            gone |= mine - others
            merged_into.add(first)
            node.replace_all_uses_with(first)
            dead.append(node)
    for node in reversed(dead):
        graph.erase_node(node)
    if gone:
        refresh_views(graph, merged_into, gone)
    return len(dead)


def _has_effects(node: fx.Node) -> bool:
    """Return whether a call does more than compute its result from its arguments."""
    return (
        ops.may_have_effects(node)
        or ops.is_mutating(node)
        or ops.is_uninitialised(node)
        or ops.is_collective(node)
    )


def _is_unbacked(node: fx.Node) -> bool:
    """Return whether the value of a node has a size that depends on data."""
    return any(_is_symbolic(v) and bool(free_unbacked_symbols(v)) for v in _leaves(node))


def _leaves(node: fx.Node) -> list[Any]:
    return leaves_of(node.meta.get("val"))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not all(type(s) is int for s in value.shape)
    return isinstance(value, SYMBOLIC)


#: Types of arguments for which equality implies that all bits are equal.
_EXACT = frozenset((fx.Node, int, bool, str, type(None), torch.dtype, torch.device, torch.layout))


def _key(node: fx.Node, mutations: int) -> Any:
    """Return a key of an operator call; two calls may be merged only if their keys are equal."""
    meta = node.meta
    kwargs = _describe(node.kwargs) if node.kwargs else None
    tags = meta.get("recompute"), meta.get("ac_graph_id")
    # The target's id instead of the target, because hashing an operator overload is slower.
    return (id(node.target), _describe_all(node.args), kwargs, tags, mutations)


def _describe_all(xs: Iterable[Any]) -> Any:
    """Return a hashable key of a list of arguments; two lists have equal keys only if all types and bits are equal."""
    kinds = tuple(map(type, xs))
    if _EXACT.issuperset(kinds):
        return (kinds, tuple(xs))
    return (kinds, *[x if k in _EXACT else _describe(x) for k, x in zip(kinds, xs, strict=True)])


def _describe(x: Any) -> Any:
    """Return a hashable key of an argument; two arguments of one type have equal keys only if all bits are equal."""
    if isinstance(x, (tuple, list)):
        return _describe_all(x)
    if isinstance(x, dict):
        return (tuple(x), _describe_all(x.values()))
    if isinstance(x, float):
        # Bytes differ for 0.0 and -0.0, and agree for NaNs of equal bits. `==` does the opposite.
        return struct.pack("<d", x)
    if isinstance(x, SYMBOLIC):
        # Comparing symbols would add guards; their text adds none.
        return str(x.node.expr)
    return x
