"""Nodes copied from one graph to the end of another, quickly.

`torch.fx.Graph.node_copy` takes a node for something that a user has just written: it looks for
symbolic leaves in the arguments, makes up a name and checks it, and goes through five layers. A
node that comes out of a graph has been through all that. Here it is built from its parts by the
same few primitives that `torch.fx` itself ends in, which takes a third of the time. Those are private:
with a version of PyTorch that remat is not tested with, `node_copy` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from remat import torch_compat

#: Metadata of a run in a half in which its name is another one's: the node's name in the joint graph.
RUN_OF = "run_of"
#: Finds, for a node that a copied node reads, what the copy reads instead.
Lookup = Callable[[fx.Node], Any]
#: The copy of each node.
Copies = dict[fx.Node, fx.Node]


def run_of(node: fx.Node) -> str:
    """The name in the joint graph of the node that a forward or backward node runs."""
    return str(node.meta.get(RUN_OF, node.name))


class Copier:
    """Appends copies of a graph's nodes to another; metadata are copied one level deep.

    Names are kept where they are free; made-up names later count on from those of the source.

    Args:
        graph: where to.
        source: where from.
        quick: whether to go the quick way; None: if PyTorch is tested and nobody watches new nodes.

    Attributes:
        copies: the copy of each node so far; what is copied reads the copies of what it read.
    """

    def __init__(self, graph: fx.Graph, source: fx.Graph, *, quick: bool | None = None) -> None:
        if quick is None:
            quick = graph.owning_module is None and torch_compat.is_tested()
        self.copies: Copies = {}
        self._graph = graph
        self._taken = torch_compat.used_names(source)
        self._run = torch_compat.quick_copier(graph, source) if quick else None

    def copy(
        self, nodes: Iterable[fx.Node], lookup: Lookup | None = None, *, apart: bool = False
    ) -> None:
        """Appends the copies of nodes, which read what ``lookup`` says, if it is given.

        A copy is called as its node. Where that name is another one's (``apart``) it is called
        ``NAME_again`` and marked.
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
        made = self._graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        made.meta = {**node.meta, RUN_OF: node.name}
        return made

    def take(self, nodes: Iterable[fx.Node]) -> None:
        """Appends placeholders for the values of nodes, under their names."""
        if self._run is not None:
            self._run(nodes, self.copies.__getitem__, self.copies, taken=True)
            return
        for node in nodes:
            made = self.copies[node] = self._graph.placeholder(node.name, type_expr=node.type)
            made.meta = dict(node.meta)
