"""Pass that merges forward and backward into one graph, for a step that was traced as one graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import PlanError
from remat.graph.whole_graph import joined
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State, partitioned_graphs


@dataclass(frozen=True)
class Join(Pass):
    """Merge forward and backward into one graph again, if `remat.whole_graph` made the joint graph from one graph.

    The new graph replaces the joint graph in the state, and has the inputs and outputs of the original
    graph.
    """

    name: ClassVar[str] = "join"
    stage: ClassVar[Stage] = Stage.SPLIT

    def run(self, state: State) -> PassResult:
        joint = state.joint
        forward, backward = partitioned_graphs(state, self.name)
        if not joint.places:
            raise PlanError(
                f"'{self.name}' is about a step that is one graph, but '{joint.name}' is a joint graph of AOTAutograd, "
                "whose forward and backward run at different times; use remat.whole_graph(gm), or leave the pass out"
            )
        module = joined(joint, forward, backward)
        joined_graph = replace(
            joint, graph_module=module, num_fwd_outputs=len(joint.places), places=()
        )
        after = replace(
            state,
            joint=joined_graph,
            decision=None,
            limits=None,
            provenance=None,
            forward=None,
            backward=None,
        )
        return PassResult(state=after, modified=True, detail=f"{len(module.graph.nodes)} nodes")
