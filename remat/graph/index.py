"""A joint graph as integers: positions, inputs and users, computed once per graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from remat.graph import ops
from remat.graph.writes import by_target

#: The nodes that a node reads, without repeats, in argument order.
#: PyTorch keeps them; its public property copies them into a list at each call.
inputs_of: Callable[[fx.Node], Iterable[fx.Node]] = operator.attrgetter(
    "_input_nodes" if hasattr(fx.Node, "_input_nodes") else "all_input_nodes"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphIndex:
    """Positions of the nodes of a graph, without its output node.

    Attributes:
        nodes: the nodes in graph order; the output node is left out.
        position: position of each node.
        inputs: for each node, the positions it reads, without repeats, in argument order.
        users: for each node, the positions that read it, in graph order.
        by_name: position of each node name.
        values: what stands in for each node's value: ``meta["val"]``, None without.
        plain: whether the node is nothing but a function of its arguments (`ops.is_plain`).
    """

    nodes: tuple[fx.Node, ...]
    position: dict[fx.Node, int]
    inputs: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    by_name: dict[str, int]
    values: tuple[Any, ...]
    plain: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def special(self) -> list[int]:
        """Positions of the nodes that are not plain."""
        return [i for i, plain in enumerate(self.plain) if not plain]


def index_graph(graph: fx.Graph) -> GraphIndex:
    """Numbers the nodes of a graph."""
    nodes = tuple([n for n in graph.nodes if n.op != "output"])
    position = dict(zip(nodes, range(len(nodes)), strict=True))
    at = position.__getitem__
    inputs = tuple([tuple(map(at, inputs_of(n))) for n in nodes])
    users: list[list[int]] = [[] for _ in nodes]
    for i, read in enumerate(inputs):
        for j in read:
            users[j].append(i)
    return GraphIndex(
        nodes=nodes,
        position=position,
        inputs=inputs,
        users=tuple(map(tuple, users)),
        by_name={n.name: i for i, n in enumerate(nodes)},
        values=tuple([n.meta.get("val") for n in nodes]),
        plain=are_plain(nodes),
    )


def are_plain(nodes: Iterable[fx.Node]) -> tuple[bool, ...]:
    """For each node, whether it is nothing but a function of its arguments (`ops.is_plain`)."""
    return tuple(by_target(nodes, ops.is_plain))
