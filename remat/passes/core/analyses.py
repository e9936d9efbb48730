"""Analyses that several passes use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.graph.roles import distances
from remat.passes.core.state import Analysis, State
from remat.passes.core.state import Classification as Classification
from remat.passes.core.state import Costs as Costs
from remat.passes.core.state import GraphProblemOf as GraphProblemOf
from remat.passes.core.state import Memory as Memory
from remat.passes.core.state import Positions as Positions


@dataclass(frozen=True)
class Distances(Analysis[tuple[int, ...]]):
    """Distance of each node of the joint graph from backward.

    The distance from backward is the least number of edges, along the data flow, to a node that forward
    does not require. The result has one distance per node of the joint graph, in graph order. The
    distance from backward is 0 for nodes that forward does not require, and
    `remat.graph.roles.UNREACHABLE` for nodes without a path to such a node.
    """

    name: ClassVar[str] = "distances"
    summary: ClassVar[str] = "edges between each forward node and backward"

    def compute(self, state: State) -> tuple[int, ...]:
        return distances(state.index, state.roles)
