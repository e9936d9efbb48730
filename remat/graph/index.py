"""Number the nodes of a joint graph once, and store the inputs and users of each node as these numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from remat.graph import ops
from remat.graph.memory.writes import by_target

#: Function that returns the nodes that a node reads, without repeats, in argument order. It avoids the public
#: property `all_input_nodes` of `fx.Node`, which copies these nodes into a list at each access.
inputs_of: Callable[[fx.Node], Iterable[fx.Node]] = operator.attrgetter(
    "_input_nodes" if hasattr(fx.Node, "_input_nodes") else "all_input_nodes"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphIndex:
    """Positions of the nodes of a graph, without its output node.

    Attributes:
        nodes: the nodes in graph order, without the output node.
        position: position of each node in ``nodes``.
        inputs: for each node, the positions of the nodes that it reads, without repeats, in argument
            order.
        users: for each node, the positions of the nodes that read it, in graph order.
        by_name: position of each node, by node name.
        values: fake value of each node (``meta["val"]``); None if the node has no fake value.
        plain: for each node, whether its result depends on its arguments only and the call has no
            side effect.
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
        """Positions of the nodes that are not ``plain``, such as random operators."""
        return [i for i, plain in enumerate(self.plain) if not plain]


def index_graph(graph: fx.Graph) -> GraphIndex:
    """Number the nodes of a graph and record the inputs and users of each node."""
    # List comprehensions inside `tuple(...)` are faster than generators here.
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
    """Return for each node whether its result depends on its arguments only, without side effects (`ops.is_plain`)."""
    return tuple(by_target(nodes, ops.is_plain))
