"""Analyses that several passes use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.graph.liveness import Timeline, timeline
from remat.graph.roles import distances
from remat.passes.core.state import Analysis, State, partitioned_graphs
from remat.passes.core.state import Classification as Classification
from remat.passes.core.state import Costs as Costs
from remat.passes.core.state import GraphProblemOf as GraphProblemOf
from remat.passes.core.state import Memory as Memory
from remat.passes.core.state import Positions as Positions


@dataclass(frozen=True)
class Distances(Analysis[tuple[int, ...]]):
    """Least number of edges from each node, along the data flow, to a node outside of forward.

    A node is outside of forward if forward does not require the node. The result is a tuple indexed
    by position in the joint graph. The value is 0 for nodes outside of forward, and
    `remat.graph.roles.UNREACHABLE` for nodes from which no path leads out of forward.
    """

    name: ClassVar[str] = "distances"
    summary: ClassVar[str] = "edges between each forward node and backward"

    def compute(self, state: State) -> tuple[int, ...]:
        return distances(state.index, state.roles)


@dataclass(frozen=True)
class Liveness(Analysis[Timeline]):
    """Lifetimes of all storages over one run of the forward graph, then the backward graph."""

    name: ClassVar[str] = "liveness"
    summary: ClassVar[str] = "lifetimes of storages over forward and backward, and their peak"
    after_partition: ClassVar[bool] = True

    def compute(self, state: State) -> Timeline:
        return timeline(*partitioned_graphs(state, self.name), state.joint.num_fwd_outputs)
