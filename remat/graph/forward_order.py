"""In which order forward runs: what only backward reads is made as soon as what it is made from."""

from __future__ import annotations

from collections.abc import Iterable

from remat.graph.index import GraphIndex
from remat.graph.ownership import Storages
from remat.graph.roles import Roles


class ForwardOrder:
    """The order of a joint graph's nodes in forward.

    What the user's forward needs runs in the order of the graph. Whatever else forward runs, as backward
    reads it, stands at the graph's end, behind all of that; there, what it is made from would have to be
    kept as long. It runs right behind the last of that instead, unless that is memory that forward
    writes to, or is there from the start.
    """

    def __init__(self, index: GraphIndex, roles: Roles, storages: Storages) -> None:
        written = storages.mutated | storages.rewritten.keys()
        owner, placeholders = storages.owner, roles.placeholders
        self._rank = rank = list(range(len(index)))
        for i, reads in enumerate(index.inputs):
            if roles.required_forward[i] or roles.tangent_closure[i] or not index.plain[i]:
                continue
            made = [j for j in reads if j not in placeholders and index.nodes[j].op != "get_attr"]
            if made and not any(owner[j] in written for j in reads):
                rank[i] = max(rank[j] for j in made)

    def sorted(self, positions: Iterable[int]) -> list[int]:
        """Positions in the order in which forward runs them."""
        rank = self._rank
        return sorted(positions, key=lambda i: (rank[i], i))
