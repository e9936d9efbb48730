"""Distance from backward (SPEC A3), as a pass: it computes and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.graph.roles import UNREACHABLE
from remat.passes.base import Pass, PassResult, Stage, State


@dataclass(frozen=True)
class DistanceFromBackward(Pass):
    """Computes how many edges lie between each forward node and backward.

    The distances stay with the state, as ``state.roles.distance``, until the graph changes.
    """

    name: ClassVar[str] = "dist-from-backward"
    stage: ClassVar[Stage] = Stage.JOINT
    summary: ClassVar[str] = "edges between each forward node and backward"

    def run(self, state: State) -> PassResult:
        finite = [d for d in state.roles.distance if d < UNREACHABLE]
        return PassResult(
            state=state, modified=False, detail=f"at most {max(finite, default=0)} edges"
        )
