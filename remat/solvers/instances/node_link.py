"""Read schedule problems from published graphs in networkx's node-link JSON.

Two formats of these graphs are supported, Checkmate's and MOCCASIN's. In Checkmate's files, nodes have the keys
``cost_cpu`` and ``cost_ram``, and edges have ``source`` and ``target``. The nodes of Checkmate's graphs are put in the
order of networkx's topological sort. In MOCCASIN's random layered graphs, nodes have ``duration`` and ``out_cost``,
edges have ``"0"`` and ``"1"``, and ``graph.order`` lists the nodes in order.
"""

from __future__ import annotations

from typing import Any

from remat.errors import ProblemError
from remat.solvers.schedule.problem import ScheduleProblem

_COSTS = ("cost_cpu", "duration", "cost")
_SIZES = ("cost_ram", "out_cost", "size")
_EDGES = (("source", "target"), ("0", "1"))


def is_node_link(data: Any) -> bool:
    """Return whether a parsed JSON value looks like a node-link graph: it has nodes and edges."""
    if not isinstance(data, dict) or "remat_instance" in data:
        return False
    return isinstance(data.get("nodes"), list) and _links(data) is not None


def read_node_link(data: dict[str, Any]) -> ScheduleProblem:
    """Convert a node-link graph to a schedule problem without a capacity.

    The nodes are in the order of ``graph.order`` or, if the file has no such list, sorted topologically.

    Raises:
        ProblemError: the graph is incomplete or contradicts itself; the message names the fault.
    """
    import networkx as nx

    nodes, links = data["nodes"], _links(data) or []
    ids = [str(n.get("id", i)) if isinstance(n, dict) else None for i, n in enumerate(nodes)]
    by_id = dict(zip(ids, nodes, strict=True))
    if None in by_id or len(by_id) != len(nodes):
        raise ProblemError("nodes must be objects with different ids")
    graph = nx.DiGraph()
    graph.add_nodes_from(by_id)
    for i, link in enumerate(links):
        ends = [
            str(end) for a, b in _EDGES if a in link and b in link for end in (link[a], link[b])
        ]
        if not ends or not by_id.keys() >= set(ends):
            raise ProblemError(
                f"links[{i}] is {str(link)[:60]}; expected the ids of two nodes as source and target"
            )
        graph.add_edge(*ends[:2])
    if data.get("directed") is False:
        raise ProblemError("the graph is undirected; expected edges from producers to consumers")
    attributes = data.get("graph")
    given = attributes.get("order") if isinstance(attributes, dict) else None
    if given is not None and not isinstance(given, list):
        raise ProblemError("graph.order must be a list of node ids")
    try:
        order = list(nx.topological_sort(graph)) if given is None else [*map(str, given)]
    except nx.NetworkXUnfeasible:
        raise ProblemError(
            "the graph has a cycle; expected edges from producers to consumers"
        ) from None
    for v in order:
        if v not in by_id:
            raise ProblemError(f"graph.order names '{v}', which is no node")
    at = {v: i for i, v in enumerate(order)}
    if not len(at) == len(order) == len(nodes):
        raise ProblemError("graph.order must name every node once")
    # Names in a file may repeat, but a `ScheduleProblem` needs different names. If they repeat, use the
    # ids, which differ.
    names = [str(by_id[v].get("name", v)) for v in order]
    return ScheduleProblem(
        names=tuple(names if len(set(names)) == len(names) else order),
        inputs=tuple(tuple(sorted(at[u] for u in graph.predecessors(v))) for v in order),
        cost=tuple(_number(by_id[v], _COSTS, v) for v in order),
        size=tuple(_number(by_id[v], _SIZES, v) for v in order),
    )


def _links(data: dict[str, Any]) -> list[dict[str, Any]] | None:
    links = data.get("links", data.get("edges"))
    return links if isinstance(links, list) and all(isinstance(x, dict) for x in links) else None


def _number(node: dict[str, Any], keys: tuple[str, ...], name: str) -> Any:
    for key in keys:
        if key in node:
            return node[key]
    raise ProblemError(f"node '{name}' has none of {', '.join(keys)}; expected one")
