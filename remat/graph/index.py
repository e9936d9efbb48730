"""A joint graph as integers: positions, inputs and users, computed once per graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphIndex:
    """Positions of the nodes of a graph, without its output node.

    Attributes:
        nodes: the nodes in graph order; the output node is left out.
        position: position of each node.
        inputs: for each node, the positions it reads, without repeats, in argument order.
        users: for each node, the positions that read it, in graph order.
        by_name: position of each node name.
    """

    nodes: tuple[fx.Node, ...]
    position: dict[fx.Node, int]
    inputs: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    by_name: dict[str, int]

    def __len__(self) -> int:
        return len(self.nodes)


def index_graph(graph: fx.Graph) -> GraphIndex:
    """Numbers the nodes of a graph."""
    nodes = tuple(n for n in graph.nodes if n.op != "output")
    position = {n: i for i, n in enumerate(nodes)}
    inputs = tuple(tuple(position[m] for m in n.all_input_nodes) for n in nodes)
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
    )
