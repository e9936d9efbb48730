"""Dead code elimination that keeps effects and random draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from remat.graph import ops
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class DeadCode(Pass):
    """Remove nodes without users.

    Random operators stay even when unread, so that the stream of random numbers after the step does
    not depend on what was planned; so do mutations, collectives and other effects, and operators that
    nobody has declared to be functions of their inputs.
    """

    name: ClassVar[str] = "dce"
    stage: ClassVar[Stage] = Stage.ANY
    summary: ClassVar[str] = "remove nodes without users; effects and random draws stay"

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            removed = sum(eliminate(m.graph) for m in state.modules.values())
            return edit.result(f"{removed} nodes removed", removed=removed)


def eliminate(graph: fx.Graph) -> int:
    """Removes dead nodes from a graph in place and returns how many."""
    removed = 0
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and ops.may_have_effects(node):
            continue
        graph.erase_node(node)
        removed += 1
    return removed
