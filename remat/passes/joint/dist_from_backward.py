"""Pass that computes the distance of each forward node from backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.graph.roles import UNREACHABLE
from remat.passes.core.analyses import Distances
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class DistanceFromBackward(Pass):
    """Compute the least number of edges from each forward node to a node that forward does not require.

    The pass changes no graph. Later passes get the distances from ``state.get(Distances())``.
    """

    name: ClassVar[str] = "dist-from-backward"
    stage: ClassVar[Stage] = Stage.JOINT
    summary: ClassVar[str] = "edges between each forward node and backward"

    def run(self, state: State) -> PassResult:
        finite = [d for d in state.get(Distances()) if d < UNREACHABLE]
        return PassResult(
            state=state, modified=False, detail=f"at most {max(finite, default=0)} edges"
        )
