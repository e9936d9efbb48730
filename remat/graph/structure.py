"""Whether a graph is whole: what `torch.fx.Graph.lint` asks, in one quick walk."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from remat import torch_compat

_MISSING = object()


def check_structure(module: fx.GraphModule) -> str | None:
    """The first fault in the structure of a graph, in words; None where it is whole.

    Every input is a node of the same graph that stands before; users are just those that read a
    node; names are unique; placeholders come first; one output node ends the graph; attributes that
    are fetched exist.
    """
    graph = module.graph
    seen: dict[fx.Node, None] = {}
    names: dict[str, fx.Node] = {}
    last: fx.Node | None = None
    begun = False
    for node in graph.nodes:
        if last is not None and last.op == "output":
            return f"'{node.name}' stands behind the output"
        if node.op == "placeholder":
            if begun:
                return f"placeholder '{node.name}' stands behind '{last}', which is none"
        else:
            begun = True
        if node.graph is not graph:
            return f"'{node.name}' belongs to another graph"
        if names.setdefault(node.name, node) is not node:
            return f"two nodes are called '{node.name}'"
        for read in node.all_input_nodes:
            if read not in seen:
                return _unseen(node, read, graph)
            if node not in read.users:
                return f"'{node.name}' reads '{read.name}', which does not have it among its users"
        if node.op == "get_attr" and attribute_of(module, node.target, _MISSING) is _MISSING:
            return f"'{node.name}' fetches '{node.target}', which the module does not have"
        seen[node] = None
        last = node
    if last is None or last.op != "output":
        return "it has no output node at its end"
    for node in seen:
        for user in node.users:
            if user not in seen:
                return f"'{node.name}' has a user, '{user.name}', that is not in the graph"
    return None


def _unseen(node: fx.Node, read: fx.Node, graph: fx.Graph) -> str:
    if read.graph is not graph:
        return f"'{node.name}' reads '{read.name}' of another graph"
    if torch_compat.is_erased(read):
        return f"'{node.name}' reads '{read.name}', which was erased"
    return f"'{node.name}' reads '{read.name}' before it is computed"


def attribute_of(module: object, target: object, missing: Any = None) -> Any:
    """What a module holds under a name, dotted or not; ``missing`` where there is no such thing."""
    try:
        return operator.attrgetter(str(target))(module)
    except AttributeError:
        return missing
