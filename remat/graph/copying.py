"""Nodes copied from one graph to the end of another, quickly.

`torch.fx.Graph.node_copy` takes a node for something that a user has just written: it looks for
symbolic leaves in the arguments, makes up a name and checks it, and goes through five layers. A
node that comes out of a graph has been through all that. Here it is built from its parts by the
same few primitives that `torch.fx` itself ends in, which takes a third of the time. A sample is
copied both ways, once per process; where a PyTorch builds its graphs otherwise, so that the two
copies differ, `node_copy` does the work.
"""

from __future__ import annotations

import functools
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
    """The name in the joint graph of what a node of a half runs."""
    return str(node.meta.get(RUN_OF, node.name))


class Copier:
    """Appends copies of a graph's nodes to another; metadata are copied one level deep.

    Names are kept where they are free; made-up names later count on from those of the source.

    Args:
        graph: where to.
        source: where from.
        quick: whether to go the quick way; None: if it works and nobody watches new nodes.

    Attributes:
        copies: the copy of each node so far; what is copied reads the copies of what it read.
    """

    def __init__(self, graph: fx.Graph, source: fx.Graph, *, quick: bool | None = None) -> None:
        if quick is None:
            quick = graph.owning_module is None and quick_way_works()
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


@functools.cache
def quick_way_works() -> bool:
    """Whether the quick way gives what `node_copy` gives, tried on a small graph."""
    sample = _sample()
    try:
        return _outline(_copied(sample, quick=True)) == _outline(_copied(sample, quick=False))
    except Exception:  # whatever may be otherwise about a PyTorch that was not there to be seen
        return False


def _sample() -> fx.Graph:
    """A graph with a bit of everything: nested arguments, keywords, repeats, names, types."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b", type_expr=int)
    c = graph.call_function(max, (a, [b, (a, 2)], slice(0, None, b)), {"key": {"c": b, "d": 1.5}})
    d = graph.call_function(min, (c, c, [b]))
    torch_compat.rename(d, "smallest")
    d.meta["val"] = [1]
    e = graph.create_node("get_attr", "a")
    graph.call_function(min, (d, e))
    graph.output((c, [d], {"e": e}))
    return graph


def _copied(sample: fx.Graph, *, quick: bool) -> fx.Graph:
    """A copy of the sample, edited a bit, as later passes would."""
    graph = fx.Graph()
    copier = Copier(graph, sample, quick=quick)
    for node in sample.nodes:
        if node.name == "b":
            copier.take([node])
        else:
            copier.copy([node])
    first, last = graph.find_nodes(op="call_function", target=min)
    graph.erase_node(last)
    first.append(graph.call_function(abs, (first,)))
    first.target = max
    graph.lint()
    return graph


def _outline(graph: fx.Graph) -> list[str]:
    """What can be asked of a graph and its nodes, as text."""
    used, names = torch_compat.used_names(graph), torch_compat.names_of(graph)
    found = [f"{len(graph.nodes)} {sorted(used)} {sorted(graph.nodes)}"]
    for node in graph.nodes:
        call = (node.name, node.op, node.target, node.args, node.kwargs, node.type, node.meta)
        kinds = [type(x) for x in (node, node.args, node.kwargs, *node.args)]
        around = (list(node.users), node.all_input_nodes, names[node])
        found.append(repr((call, kinds, around)))
    calls = [graph.find_nodes(op="call_function", target=f) for f in (min, max, abs)]
    found.append(repr((calls, graph.find_nodes(op="placeholder"), graph.find_nodes(op="get_attr"))))
    return found
