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
    """Remove nodes without users, unless they have effects.

    Random operators without users stay, so that the random numbers after the step do not depend on the plan. Nodes that
    mutate memory or have other effects stay even without users. Collectives such as ``all_reduce`` stay even without
    users, because another rank may use the result. Operators from outside PyTorch stay even without users, unless they
    are declared pure (`remat.declare_pure`).
    """

    name: ClassVar[str] = "dce"
    stage: ClassVar[Stage] = Stage.ANY

    def run(self, state: State) -> PassResult:
        with state.edit() as edit:
            removed = sum(eliminate(m.graph) for m in state.modules.values())
            return edit.result(f"{removed} nodes removed", removed=removed)


def eliminate(graph: fx.Graph) -> int:
    """Erase, in place, the nodes that have neither users nor effects; return the number of erased nodes."""
    removed = 0
    # Users are erased before their inputs, so one sweep removes whole chains.
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and ops.may_have_effects(node):
            continue
        graph.erase_node(node)
        removed += 1
    return removed
