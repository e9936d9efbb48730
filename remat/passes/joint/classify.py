"""Passes that report which nodes forward and backward require, and how far forward's nodes are from backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.graph.roles import UNREACHABLE
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import Distances, PassResult, State


@dataclass(frozen=True)
class Classify(Pass):
    """Count the nodes that forward requires, the nodes that backward requires, and the nodes that neither requires.

    The pass changes no graph. Later passes get the classification from ``state.roles``.
    """

    name: ClassVar[str] = "classify"
    stage: ClassVar[Stage] = Stage.JOINT

    def run(self, state: State) -> PassResult:
        roles = state.roles
        counts = {
            "forward": sum(roles.required_forward),
            "backward": sum(roles.required_backward),
            "unclaimed": sum(map(roles.unclaimed, range(len(state.index)))),
        }
        detail = "{forward} required by forward, {backward} by backward, {unclaimed} unclaimed"
        return PassResult(
            state=state, modified=False, detail=detail.format(**counts), statistics=counts
        )


@dataclass(frozen=True)
class DistanceFromBackward(Pass):
    """Compute the least number of edges from each forward node to a node that forward does not require.

    The pass changes no graph. Later passes get the distances from ``state.get(Distances())``.
    """

    name: ClassVar[str] = "dist-from-backward"
    stage: ClassVar[Stage] = Stage.JOINT

    def run(self, state: State) -> PassResult:
        most = max((d for d in state.get(Distances()) if d < UNREACHABLE), default=0)
        return PassResult(
            state=state,
            modified=False,
            detail=f"at most {most} edges",
            statistics={"largest-distance": most},
        )
