"""Order of nodes in forward: nodes that only backward reads run right after their inputs."""

from __future__ import annotations

from collections.abc import Iterable

from remat.graph.index import GraphIndex
from remat.graph.memory.ownership import Storages
from remat.graph.roles import Roles


def forward_sorted(
    positions: Iterable[int], index: GraphIndex, roles: Roles, storages: Storages
) -> list[int]:
    """Sort node positions of a joint graph by the order in which forward runs the nodes.

    Nodes that the user's forward needs run in graph order. Other nodes run in forward only because
    backward reads their results. The joint graph lists such nodes at its end. If they ran there,
    their inputs would stay alive until the end of forward. Therefore such a node runs right after
    its last input.

    Some of these other nodes keep their place in graph order. These are random nodes, nodes with
    side effects, and nodes that read memory to which forward writes. Nodes that read only
    placeholders and ``get_attr`` nodes also keep their place.
    """
    written = storages.mutated | storages.rewritten.keys()
    owner, placeholders = storages.owner, roles.placeholders
    rank = list(range(len(index)))
    for i, reads in enumerate(index.inputs):
        if roles.required_forward[i] or roles.tangent_closure[i] or not index.plain[i]:
            continue
        made = [j for j in reads if j not in placeholders and index.nodes[j].op != "get_attr"]
        if made and not any(owner[j] in written for j in reads):
            rank[i] = max(rank[j] for j in made)
    return sorted(positions, key=lambda i: (rank[i], i))
