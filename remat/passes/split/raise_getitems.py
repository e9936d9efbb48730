"""Pass that moves each ``getitem`` on a tuple right after the operator that returns the tuple."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from remat.passes.core.base import Pass
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class RaiseGetitems(Pass):
    """Move every ``getitem`` right after the operator that returns the tuple, to free unused elements early.

    The pass works on the joint graph, or on forward and backward after partitioning. In remat's own pipelines, the pass
    runs after partitioning and after reordering, because both may move elements of tuples.
    """

    name: ClassVar[str] = "raise-getitems"

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            moved = sum(raise_getitems(m.graph) for m in state.modules.values())
            return edit.result(f"{moved} nodes moved", moved=moved)


def raise_getitems(graph: fx.Graph) -> int:
    """Move every ``getitem`` of a graph right after its tuple, in place; return the number of moved nodes."""
    moved = 0
    behind: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        parent = node.args[0]
        # An element of a placeholder stays where it is, because no call may stand among placeholders.
        if not isinstance(parent, fx.Node) or parent.op == "placeholder":
            continue
        anchor = behind.get(parent, parent)
        if anchor.next is not node:
            anchor.append(node)
            moved += 1
        behind[parent] = node
    return moved
