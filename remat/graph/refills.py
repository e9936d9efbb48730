"""Inputs that a user may refill between forward and backward, as a loader does with its pinned buffer.

Eager PyTorch allows that for an input that autograd has not saved, and raises for one that it has.
Which it has saved shows in the joint graph: the nodes that were traced in backward read what autograd
had saved in forward, and nothing else of it.
"""

from __future__ import annotations

import torch
from torch import fx

from remat.graph import ops
from remat.graph.index import inputs_of
from remat.graph.joint import JointGraph, Role, role_of, split_outputs
from remat.graph.roles import belongs_to_backward
from remat.graph.source import source_line
from remat.graph.writes import aliased_arguments


def refillable_inputs(joint: JointGraph) -> frozenset[str]:
    """Names of the inputs that eager autograd leaves to the user between forward and backward.

    Parameters and buffers are none of them, nor is what autograd saves, itself or as a view.

    Args:
        joint: the joint graph as it was traced: merging equal nodes hides who read what.
    """
    inputs = joint.graph.find_nodes(op="placeholder")
    static = {inputs[k] for k in joint.static_inputs if k < len(inputs)}
    nodes = [n for n in joint.graph.nodes if n.op != "output"]
    base: dict[fx.Node, fx.Node] = {}  # of an input and of its views, the input
    late: set[fx.Node] = set()
    saved: set[fx.Node] = set()
    for node, viewed in zip(nodes, aliased_arguments(nodes), strict=True):
        if node.op == "placeholder":
            role = role_of(node)
            if role is Role.PRIMAL and node not in static and _is_refillable(node):
                base[node] = node
            elif role.in_backward:
                late.add(node)
            continue
        read = inputs_of(node)
        if belongs_to_backward(node) or not late.isdisjoint(read):
            late.add(node)
            if not ops.name_of(node.target).startswith("sym_"):  # sizes are not what is refilled
                saved.update(base[n] for n in read if n in base)
        elif viewed in base:
            base[node] = base[viewed]
    saved.update(base[o] for o in split_outputs(joint)[1] if isinstance(o, fx.Node) and o in base)
    return frozenset(n.name for n in base.values() if n not in saved)


def told(graph: fx.Graph, name: str) -> str:
    """An input for people: its name, its type and shape, and the first line that reads it."""
    for node in graph.find_nodes(op="placeholder"):
        if node.name == name:
            value = node.meta["val"]
            kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            line = next(filter(None, map(source_line, node.users)), "")
            return f"{name}  {kind}" + (f"  read at {line}" if line else "")
    return name


def _is_refillable(node: fx.Node) -> bool:
    """Whether an input is a tensor that no module owns."""
    desc = node.meta.get("desc")
    owned = desc is not None and (desc.is_param() or desc.is_buffer())
    return not owned and isinstance(node.meta.get("val"), torch.Tensor)
