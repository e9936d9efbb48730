"""Append copies of nodes to another graph, faster than `torch.fx.Graph.node_copy`.

`node_copy` treats a node as newly written by a user. Therefore `node_copy` searches the arguments for symbolic
leaves, invents and checks a name, and passes through five layers of calls. A node that is already in a graph needs
neither the search nor the checks. This module copies a node in a third of the time, because it calls private
primitives of `torch.fx` directly. With a version of PyTorch that remat is not tested with, this module uses
`node_copy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from remat import torch_compat

#: Metadata key for the name that the original of a copied node has in the joint graph. The key is set only on a
#: copy with a new name. In this case another node of the same forward or backward graph has the original's name.
RUN_OF = "run_of"
#: Function that maps each input of a copied node to the argument that the copy reads instead.
Lookup = Callable[[fx.Node], Any]
#: Map from each node to its copy.
Copies = dict[fx.Node, fx.Node]


def run_of(node: fx.Node) -> str:
    """Return the name that a node of forward or backward has in the joint graph, usually the node's own name."""
    # If forward or backward runs one joint-graph node several times, only one run has the node's name.
    return str(node.meta.get(RUN_OF, node.name))


class Copier:
    """Appends copies of one graph's nodes to another graph; metadata is copied shallowly.

    A copy keeps the original's name, unless a node of the receiving graph has this name already.

    Args:
        graph: graph that receives the copies.
        source: graph of the nodes to copy.
        quick: whether to copy with PyTorch's private primitives. None: use them if remat is tested
            with this version of PyTorch and ``graph`` has no owning module.

    Attributes:
        copies: map from each node copied so far to its copy. By default, a new copy reads the
            copies of its original's inputs.
    """

    def __init__(self, graph: fx.Graph, source: fx.Graph, *, quick: bool | None = None) -> None:
        if quick is None:
            # The hooks of an owning module would miss nodes that private primitives create.
            quick = graph.owning_module is None and torch_compat.is_tested()
        self.copies: Copies = {}
        self._graph = graph
        # All names of the source count as taken, because its other nodes may be copied later.
        self._taken = torch_compat.used_names(source)
        self._run = torch_compat.quick_copier(graph, source) if quick else None

    def copy(
        self, nodes: Iterable[fx.Node], lookup: Lookup | None = None, *, apart: bool = False
    ) -> None:
        """Append copies of nodes to the receiving graph; each node must come after its inputs.

        Args:
            lookup: maps each input of a copied node to the argument that the copy reads instead.
                None: maps each input to its copy in ``copies``.
            apart: name each copy ``NAME_again`` after its original NAME, and store NAME in the copy's
                metadata. Needed if the receiving graph already has a node NAME.
        """
        find = self.copies.__getitem__ if lookup is None else lookup
        if apart:
            for node in nodes:
                self.copies[node] = self._apart(node, find)
            return
        if self._run is not None:
            self._run(nodes, find, self.copies, taken=False)
            return
        for node in nodes:
            self.copies[node] = self._graph.node_copy(node, find)

    def _apart(self, node: fx.Node, find: Lookup) -> fx.Node:
        name = f"{node.name}_again"
        while name in self._taken:
            name += "_"
        args, kwargs = fx.map_arg((node.args, node.kwargs), find)
        copy = self._graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copy.meta = {**node.meta, RUN_OF: run_of(node)}
        return copy

    def take(self, nodes: Iterable[fx.Node]) -> None:
        """Append a placeholder to the receiving graph for each node, with the node's name and metadata."""
        if self._run is not None:
            self._run(nodes, self.copies.__getitem__, self.copies, taken=True)
            return
        for node in nodes:
            copy = self.copies[node] = self._graph.placeholder(node.name, type_expr=node.type)
            copy.meta = dict(node.meta)
