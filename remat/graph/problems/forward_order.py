"""Order the nodes of forward, so that nodes that only backward reads run right after their inputs."""

from __future__ import annotations

from collections.abc import Iterable

from remat.graph.index import GraphIndex
from remat.graph.memory.ownership import Storages
from remat.graph.roles import Roles


def forward_sorted(
    positions: Iterable[int], index: GraphIndex, roles: Roles, storages: Storages
) -> list[int]:
    """Sort node positions of a joint graph by the order in which forward runs the nodes.

    Nodes that the user's forward needs run in graph order. A node that only backward reads runs right
    after its last input.
    """
    written = storages.mutated | storages.rewritten.keys()
    owner, placeholders = storages.owner, roles.placeholders
    rank = list(range(len(index)))
    for i, reads in enumerate(index.inputs):
        if roles.required_forward[i] or roles.tangent_closure[i] or not index.plain[i]:
            continue
        # The joint graph lists nodes for backward at its end. If they ran there, their inputs would stay alive
        # until the end of forward.
        computed = [j for j in reads if j not in placeholders and index.nodes[j].op != "get_attr"]
        # A node that reads memory to which forward writes keeps its place.
        if computed and not any(owner[j] in written for j in reads):
            rank[i] = max(rank[j] for j in computed)
    return sorted(positions, key=lambda i: (rank[i], i))
