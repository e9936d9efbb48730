"""Elements of tuples right behind the operator that makes them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from remat.passes.core.base import Pass
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class RaiseGetitems(Pass):
    """Moves every ``getitem`` to its operator, so that unused elements of the tuple are freed early.

    It does so in the joint graph as well as in the two halves. In pipelines of ours it stands behind
    the split, as partitioning and reordering place the elements anew.
    """

    name: ClassVar[str] = "raise-getitems"
    summary: ClassVar[str] = "take tuples apart right behind the operator that makes them"

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            moved = sum(raise_getitems(m.graph) for m in state.modules.values())
            return edit.result(f"{moved} nodes moved", moved=moved)


def raise_getitems(graph: fx.Graph) -> int:
    """Moves elements of tuples in place and returns how many moved."""
    moved = 0
    behind: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        parent = node.args[0]
        if not isinstance(parent, fx.Node) or parent.op == "placeholder":
            continue
        anchor = behind.get(parent, parent)
        if anchor.next is not node:
            anchor.append(node)
            moved += 1
        behind[parent] = node
    return moved
