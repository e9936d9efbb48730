"""Pass that makes all ranks of a job with the same graph use one decision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import PlanError, ProblemError, RematError
from remat.graph.capture.rank_fingerprint import outline
from remat.graph.problems.lowering import Decision, offload_tags
from remat.passes.core.base import Pass, Stage
from remat.passes.core.provenance import Provenance, SavedLimits
from remat.passes.core.state import PassResult, State
from remat.passes.ranks.protocol import Question, Ranks, Verdict, other_ranks, tell
from remat.passes.split.arrangement import arrange
from remat.solvers.graph.problem import evaluate

#: Seconds that the other ranks wait for rank 0 to decide first.
WAIT_S = 30.0


@dataclass(frozen=True)
class AgreeRanks(Pass):
    """Adopt the decision of the first rank that decided on a graph equal to this rank's graph, usually rank 0.

    The pass does nothing without a process group of at least two ranks. A rank keeps its own decision if the first
    rank's decision does not fit the rank's graph or the rank's limit on saved bytes.

    Attributes:
        options: planning options as text; only ranks with equal text share a decision.
        wait_s: seconds that the other ranks wait for rank 0 to decide first.
        capacity_too: whether to adopt the first rank's limit on saved bytes with its decision. True
            under a budget on the peak, under which the limit on saved bytes is a part of the decision.

    Raises:
        ProblemError: ``wait_s`` is not a finite number of at least 0.
        PlanError: when the pass runs, if the decision offloads values without offload tags.
    """

    name: ClassVar[str] = "agree-ranks"
    stage: ClassVar[Stage] = Stage.DECIDE
    optional: ClassVar[bool] = False

    options: str = ""
    wait_s: float = WAIT_S
    capacity_too: bool = False

    def __post_init__(self) -> None:
        if type(self.wait_s) not in (int, float) or not 0 <= self.wait_s < math.inf:
            raise ProblemError(
                f"the wait for rank 0 is {self.wait_s!r}; expected seconds, 0 or more (0: take a "
                "decision that rank 0 has published already, without waiting)"
            )

    def run(self, state: State) -> PassResult:
        ranks = other_ranks()
        if ranks is None or state.decision is None:
            return PassResult(state=state, modified=False, detail="no other rank")
        tagged = offload_tags(state.index.nodes, state.storages.owner)
        names = {state.index.nodes[at].name for at in tagged}
        if any(value.name not in names for value in state.decision.offloads):
            raise PlanError(
                f"the plan for '{state.joint.name}' offloads values, on which ranks do not agree yet; "
                "leave offload out (tags for the host hold without it), or let every rank decide by itself with "
                "rank_wait_s=None"
            )
        question = Question(
            graph=state.joint.name, outline=outline(state.joint), options=self.options
        )
        own = _verdict(state, state.decision, ranks)
        theirs = ranks.settle(question, own, self.wait_s)
        if theirs.schedule == own.schedule:
            return PassResult(state=state, modified=False, detail=f"as rank {theirs.rank}")
        return self._take_over(state, question, own, theirs)

    def _take_over(
        self, state: State, question: Question, own: Verdict, theirs: Verdict
    ) -> PassResult:
        """Adopt another rank's decision if the decision fits this rank's graph and limit on saved bytes."""
        names = question.outline.names
        limits, provenance = _how(state)
        whose = (
            f"ranks disagree on '{question.graph}': rank {own.rank} found {own}; rank {theirs.rank} "
            f"found {theirs}"
        )
        if own.rank == theirs.rank:
            whose = f"rank {own.rank} found {own} for '{question.graph}'; before, it found {theirs}"
        saved, snapshots, forward, backward = (
            tuple(names[i] for i in at) for at in theirs.schedule
        )
        # Ranks need not agree on copies to the host. This rank's copies name nodes of the order that is given
        # up here. Empty names give the copies their default places.
        offloads = () if state.decision is None else state.decision.offloads
        decision = Decision(
            saved=saved,
            snapshots=snapshots,
            forward_order=forward,
            backward_order=backward,
            offloads=tuple(
                replace(value, freed_after="", fetched_before="")
                for value in offloads
                if value.name in saved
            ),
        )
        capacity = theirs.capacity if self.capacity_too else limits.capacity
        refused = _refusal(state, decision, capacity)
        if refused is not None:
            tell("refused", f"{whose}, which does not fit here: {refused}. Each keeps its own")
            return PassResult(state=state, modified=False, detail="disagreed")
        deterministic = provenance.deterministic and theirs.deterministic
        taken = replace(
            provenance,
            solver=theirs.solver,
            deterministic=deterministic,
            # A bound proven for another capacity does not hold for the adopted one.
            recompute_bound=provenance.recompute_bound if capacity == limits.capacity else 0,
        )
        why = (
            "the solver or the cost model answers differently from one time to the next"
            if deterministic
            else "a clock ended a search"
        )
        tell("decision", f"{whose}, which is taken ({why})")
        return PassResult(
            state=replace(
                state,
                decision=decision,
                limits=replace(limits, capacity=capacity),
                provenance=taken,
            ),
            modified=True,
            detail=f"taken over from rank {theirs.rank}",
        )


def _verdict(state: State, decision: Decision, ranks: Ranks) -> Verdict:
    """Return this rank's decision as a `Verdict`, the form in which ranks exchange decisions."""
    position = state.index.by_name
    limits, provenance = _how(state)
    lowered = state.lowered()
    evaluation = evaluate(lowered.problem, lowered.saved_of(decision))
    again = len(decision.further_runs)
    if not decision.is_ordered:
        # Only nodes that forward runs too are counted: other recomputed nodes run once, in backward.
        again = sum(lowered.problem.in_forward[i] for i in evaluation.recomputed)
    return Verdict(
        rank=ranks.rank,
        saved=tuple(sorted(position[n] for n in decision.saved)),
        snapshots=tuple(sorted(position[n] for n in decision.snapshots)),
        saved_bytes=evaluation.saved_bytes,
        recomputed=again,
        capacity=limits.capacity,
        solver=provenance.solver,
        deterministic=provenance.deterministic,
        forward_order=tuple(position[n] for n in decision.forward_order),
        backward_order=tuple(position[n] for n in decision.backward_order),
    )


def _how(state: State) -> tuple[SavedLimits, Provenance]:
    """Return the limits on the saved bytes, and the provenance, of this rank's decision."""
    return state.limits or SavedLimits(), state.provenance or Provenance()


def _refusal(state: State, decision: Decision, capacity: int | None) -> str | None:
    """Return why another rank's decision does not fit this rank's graph and limit; None if the decision fits."""
    lowered = state.lowered()
    try:
        nbytes = evaluate(lowered.problem, lowered.saved_of(decision)).saved_bytes
        if decision.is_ordered:
            arrange(state, decision)
    except RematError as error:
        return str(error)
    if capacity is not None and nbytes > capacity:
        return f"it would save {nbytes} bytes here, {capacity} allowed"
    return None
