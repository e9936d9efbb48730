"""Pass that reports which nodes forward and backward require."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State


@dataclass(frozen=True)
class Classify(Pass):
    """Classify the joint graph's nodes as required by forward, required by backward, or unclaimed (by neither).

    The pass changes no graph. `PassResult.detail` gives the number of nodes that are required by
    forward, required by backward, and unclaimed.
    """

    name: ClassVar[str] = "classify"
    stage: ClassVar[Stage] = Stage.JOINT
    summary: ClassVar[str] = "tell forward, backward and unclaimed nodes apart"

    def run(self, state: State) -> PassResult:
        roles = state.roles
        n = len(state.index)
        return PassResult(
            state=state,
            modified=False,
            detail=(
                f"{sum(roles.required_forward)} required by forward, "
                f"{sum(roles.required_backward)} by backward, "
                f"{sum(map(roles.unclaimed, range(n)))} unclaimed"
            ),
        )
