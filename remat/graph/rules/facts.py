"""Lookups and message texts that several rules on a partitioned graph use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat.graph.branch_values import Branches
from remat.graph.index import GraphIndex, are_plain, index_graph
from remat.graph.joint import JointGraph, outputs_of
from remat.graph.memory.storages import type_text
from remat.graph.roles import classify


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A joint graph that is split into forward and backward, and the limits that the split must keep.

    Attributes:
        joint: the joint graph before the split. It states which of its inputs are outputs, or inputs, of
            earlier graphs of the step.
        forward: the forward module.
        backward: the backward module.
        capacity: most bytes that forward may save for backward; None for no limit.
        count_outputs: whether a saved value that is also an output of forward counts against the
            capacity.
        user_mutated: names of inputs that backward may not read, because the user may have written
            to them.
    """

    joint: JointGraph
    forward: fx.GraphModule
    backward: fx.GraphModule
    capacity: int | None = None
    count_outputs: bool = False
    user_mutated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Fault:
    """One violation of a rule: its description and the nodes that it concerns."""

    text: str
    nodes: tuple[fx.Node, ...] = ()


class Facts:
    """A partitioned graph with cached lookups that several rules need."""

    def __init__(self, split: Split) -> None:
        self.split = split

    @cached_property
    def joint(self) -> dict[str, fx.Node]:
        """Nodes of the joint graph by name, in graph order."""
        return {n.name: n for n in self.split.joint.graph.nodes}

    @cached_property
    def joint_index(self) -> GraphIndex:
        """Positions, inputs and users of the joint graph's nodes."""
        return index_graph(self.split.joint.graph)

    @cached_property
    def branches(self) -> Branches:
        """The joint graph's branch values, and the joint graph's operators that compute without rounding."""
        return Branches(self.joint_index, classify(self.split.joint, self.joint_index))

    @cached_property
    def position(self) -> dict[str, int]:
        """Position of each joint-graph node, by name."""
        return dict(zip(self.joint, range(len(self.joint)), strict=True))

    @cached_property
    def split_nodes(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """All nodes of the forward graph, and all nodes of the backward graph."""
        return list(self.split.forward.graph.nodes), list(self.split.backward.graph.nodes)

    @cached_property
    def calls(self) -> dict[str, fx.Node]:
        """Call nodes of forward, by name."""
        return {n.name: n for n in self.split_nodes[0] if n.op == "call_function"}

    @cached_property
    def special(self) -> tuple[list[fx.Node], ...]:
        """Nodes that are not plain (`ops.is_plain`): those of the joint graph, of forward and of backward."""
        return tuple(
            [n for n, plain in zip(nodes, are_plain(nodes), strict=True) if not plain]
            for nodes in (list(self.joint.values()), *self.split_nodes)
        )

    @cached_property
    def returned(self) -> tuple[list[Any], list[Any]]:
        """Forward's outputs for the user, and the values that forward saves for backward."""
        values = outputs_of(self.split.forward.graph)
        n = self.split.joint.num_fwd_outputs
        return values[:n], values[n:]

    @cached_property
    def saved_for_backward(self) -> list[fx.Node]:
        """Nodes whose values forward saves for backward, in the order of forward's outputs."""
        return [v for v in self.returned[1] if isinstance(v, fx.Node)]

    @cached_property
    def placeholders(self) -> tuple[list[fx.Node], ...]:
        """Placeholders of the joint graph, of forward and of backward, but no states of random generators."""
        # AOTAutograd manages these states by itself.
        states = ("fwd_rng_state_", "bwd_rng_state_")
        return tuple(
            [n for n in nodes if n.op == "placeholder" and not n.name.startswith(states)]
            for nodes in (self.joint.values(), *self.split_nodes)
        )

    def is_same(self, value: Any, joint_value: Any) -> bool:
        """Return whether a value of forward or backward corresponds to a value of the joint graph."""
        if isinstance(value, fx.Node) and isinstance(joint_value, fx.Node):
            # A node that a pass added, whose name the joint graph lacks, may stand for any node.
            return value.name == joint_value.name or value.name not in self.joint
        return type(value) is type(joint_value) and value == joint_value


def described(value: Any) -> str:
    """Describe a value for a message: dtype, shape and device of a tensor, a number, or the name of a type."""
    if isinstance(value, torch.Tensor):
        return f"{type_text(value)} on {value.device}"
    return str(value) if isinstance(value, (torch.SymInt, int, float)) else type(value).__name__


def shown(value: Any) -> str:
    """Return a node's quoted name, or the text of another value."""
    return f"'{value.name}'" if isinstance(value, fx.Node) else str(value)


def called(node: fx.Node) -> str:
    """Return a node's quoted name and its call target."""
    return f"'{node.name}' ({node.target})"


def nodes_of(*values: Any) -> tuple[fx.Node, ...]:
    """Return the arguments that are nodes; of several nodes with the same name, only the last."""
    return tuple({v.name: v for v in values if isinstance(v, fx.Node)}.values())
