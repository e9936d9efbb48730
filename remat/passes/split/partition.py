"""Pass that splits a joint graph into a forward and a backward module as a decision requires."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import PlanError
from remat.graph.capture.source import located
from remat.graph.problems.lowering import Decision, must_recompute
from remat.graph.roles import belongs_to_backward
from remat.passes.core.base import Pass, Stage
from remat.passes.core.state import PassResult, State
from remat.passes.split.extraction import Extraction


@dataclass(frozen=True)
class Partition(Pass):
    """Split the joint graph into a forward and a backward module as the state's decision requires.

    If the state has no decision, `default_decision` is used: forward saves every value that backward
    reads, as in eager PyTorch.
    """

    name: ClassVar[str] = "partition"
    stage: ClassVar[Stage] = Stage.PARTITION
    optional: ClassVar[bool] = False

    def run(self, state: State) -> PassResult:
        decision = state.decision or default_decision(state)
        extraction = Extraction(state, decision)
        forward, backward = extraction.modules()
        after = replace(state, decision=decision, forward=forward, backward=backward)
        return PassResult(
            state=after,
            modified=True,
            detail=f"{len(extraction.saved)} tensors and {len(extraction.sizes)} sizes saved",
        )


def default_decision(state: State) -> Decision:
    """Return a decision that saves every value that backward reads.

    A value is recomputed if this is possible and the value cannot be saved, is tagged for recomputation, or is computed
    only by the user's backward.

    Raises:
        PlanError: backward reads a value that can be neither saved nor recomputed.
    """
    lowered = state.lowered()
    problem = lowered.problem
    nodes = state.index.nodes
    saved: set[int] = set()
    seen: set[int] = set()
    stack = list(problem.needed)
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        node = nodes[lowered.position[i]]
        runs_in_backward = not problem.in_forward[i] and belongs_to_backward(node)
        if problem.savable[i] and not (
            problem.recomputable[i] and (must_recompute(node) or runs_in_backward)
        ):
            saved.add(i)
        elif problem.recomputable[i]:
            stack.extend(problem.inputs[i])
        else:
            raise PlanError(
                f"backward reads '{node.name}', which can neither be saved nor recomputed:\n"
                f"  {located(node)}"
            )
    return lowered.decision(saved)
