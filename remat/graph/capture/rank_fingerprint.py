"""Compare joint graphs of different ranks by their outlines; graphs with equal outlines can share a plan.

The *outline* of a graph holds operators, edges, shapes, strides, dtypes, device types and tags. An outline leaves out
properties that may differ between ranks without changing a plan: node names, device indices and constants. Examples
of constants are offsets into a shard and names of process groups.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.joint import JointGraph, role_of
from remat.graph.memory.storages import leaves_of, type_text
from remat.units import some_of

#: Largest number of nodes of each graph that the description of a difference lists.
SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The properties of a joint graph on which the graph's plan depends, with one entry per node.

    Attributes:
        names: name of each node; not part of the digest.
        calls: call target, result and recompute tag of each node as text.
        inputs: for each node, positions of the nodes it reads, in argument order.
    """

    names: tuple[str, ...]
    calls: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.calls)

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of ``calls`` and ``inputs``; graphs with equal digests share decisions by node position."""
        text = json.dumps([self.calls, self.inputs])
        return hashlib.sha256(text.encode()).hexdigest()


def outline(joint: JointGraph) -> Outline:
    """Return the outline of a joint graph: operators, edges, and the tensors between them."""
    nodes = list(joint.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    devices: dict[torch.device, str] = {}
    calls, inputs = [], []
    for node in nodes:
        value = node.meta.get("val")
        tag = node.meta.get("recompute")
        call = f"output of {joint.num_fwd_outputs} + {_gaps(node)}"
        if node.op != "output":
            call = f"{_target(node)} -> {_describe(value, devices)}"
        calls.append(call if tag is None else f"{call} {getattr(tag, 'name', tag)}")
        inputs.append(_reads(node, position))
    return Outline(names=tuple(n.name for n in nodes), calls=tuple(calls), inputs=tuple(inputs))


def first_difference(one: Outline, other: Outline, whose: tuple[str, str]) -> str | None:
    """Describe the first difference between two outlines; None if they are equal.

    Args:
        one: outline of one graph.
        other: outline of the other graph.
        whose: names of the ranks that run ``one`` and ``other``, for the message.
    """
    here, there = whose
    alone = [
        f"{who} alone has {some_of([_node(graph, i) for i in extra], SHOWN, '; ')}"
        for who, graph, extra in (
            (here, one, _beyond(one, other)),
            (there, other, _beyond(other, one)),
        )
        if extra
    ]
    if alone:
        return f"{'; '.join(alone)} (of {len(one)} nodes on {here}, {len(other)} on {there})"
    # Both graphs have the same nodes, so only their order, edges or outputs can differ.
    for i in range(len(one)):
        if (one.calls[i], one.inputs[i]) != (other.calls[i], other.inputs[i]):
            mine, theirs = (f"{_node(g, i)}, which reads {_inputs(g, i)}," for g in (one, other))
            return f"node {i} is {mine} on {here}, but {theirs} on {there}"
    return None


def _beyond(one: Outline, other: Outline) -> list[int]:
    """Return the positions of nodes in ``one`` that have no counterpart in ``other``."""
    unmatched = Counter(other.calls)
    positions = []
    # The output node is compared by position in `first_difference`.
    for i, call in enumerate(one.calls[:-1]):
        # Each node of `other` is the counterpart of at most one node.
        unmatched[call] -= 1
        if unmatched[call] < 0:
            positions.append(i)
    return positions


def _inputs(graph: Outline, i: int) -> str:
    return ", ".join(graph.names[k] for k in graph.inputs[i]) or "nothing"


def _node(graph: Outline, i: int) -> str:
    return f"'{graph.names[i]}' ({graph.calls[i]})"


def _reads(node: fx.Node, position: dict[fx.Node, int]) -> tuple[int, ...]:
    """Return positions of the nodes that a node reads, in argument order, with repeats."""
    read: list[int] = []
    fx.map_arg((node.args, node.kwargs), lambda n: read.append(position[n]))
    return tuple(read)


def _target(node: fx.Node) -> str:
    """Return the name of a node's call target, or the role of a placeholder, as text."""
    if node.op == "placeholder":
        return role_of(node).value
    if node.op != "call_function":
        return f"{node.op} {node.target}"
    return ops.text_of(node.target)


def _gaps(node: fx.Node) -> str:
    """Return a text with one letter per output of a graph: ``x`` for a value, ``-`` for None."""
    values = leaves_of(node.args)
    return "".join("x" if isinstance(v, fx.Node) else "-" for v in values)


def _describe(value: Any, devices: dict[torch.device, str]) -> str:
    """Describe dtype, shape, strides and device of a value."""
    if isinstance(value, torch.Tensor):
        # Ranks use different device indices, so devices of a type are numbered in the order of first appearance.
        count = sum(d.type == value.device.type for d in devices)
        device = devices.setdefault(
            value.device, value.device.type + (f" ({count + 1})" if count else "")
        )
        stride = list(value.stride()) if value.layout is torch.strided else value.layout
        return f"{type_text(value)} by {stride} on {device}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_describe(v, devices) for v in value) + ")"
    return type(value).__name__
