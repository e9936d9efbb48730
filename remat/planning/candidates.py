"""Candidates: decisions on one graph with their saved bytes, costs and peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from remat.graph.lowering import Decision, Lowered
from remat.passes.core.choice import DecisionInfo
from remat.solvers.pareto import pareto

#: About how many choices `combine` keeps after each graph. Further choices would be nearly equal to these.
_CHOICES = 2_000
_UNKNOWN = DecisionInfo()


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A decision on one graph, with its saved bytes, its cost and, if known, its peak.

    `remat.planning.prepared.Prepared.peak` simulates the peak of a candidate's step, once for each decision.

    Attributes:
        lowered: the graph problem, which asks which nodes to save, and the map from its nodes to the joint graph.
        saved: positions of the saved nodes in the graph problem.
        saved_bytes: bytes of the saved nodes, without offloaded values.
        cost: recompute cost plus exposed transfer time, in the unit of the cost model.
        choice: the limits under which the decision was made, and the solver that made it.
        ordered: the decision, if it has node orders or offloads or was made by another planner. None if
            ``saved`` describes the decision in full.
        schedule: the schedule that the node orders were read from, as a pair. First, for each run in order,
            the node of the step problem that runs. Second, the position of the first run of backward among
            the runs. None if no search over schedules found the decision.
        alive: most bytes alive at each program point of the schedule. Keys are positions of nodes in the joint
            graph; key -1 holds the saved bytes. Empty if no search by peak evaluated the schedule.
        peak_bytes: peak in bytes: of the simulated step if it was simulated, else of the schedule.
            0 if unknown.
    """

    lowered: Lowered = field(repr=False)
    saved: tuple[int, ...]
    saved_bytes: int
    cost: int
    choice: DecisionInfo = _UNKNOWN
    ordered: Decision | None = None
    schedule: tuple[Sequence[int], int] | None = field(default=None, repr=False)
    alive: Mapping[int, int] = field(default_factory=dict, repr=False)
    peak_bytes: int = 0

    @classmethod
    def of(
        cls, lowered: Lowered, decision: Decision, cost: int, choice: DecisionInfo = _UNKNOWN
    ) -> Self:
        """Build a candidate from a `Decision`, which may have node orders or offloads.

        Args:
            lowered: the graph problem, with the map from its nodes to the joint graph.
            decision: the decision; its offloaded values do not count as saved bytes.
            cost: recompute cost plus exposed transfer time, in the unit of the cost model.
            choice: the limits under which the decision was made, and the solver that made it.
        """
        saved, size = lowered.saved_of(decision), lowered.problem.size
        return cls(
            lowered=lowered,
            saved=saved,
            saved_bytes=sum(size[i] for i in saved) - sum(o.nbytes for o in decision.offloads),
            cost=cost,
            choice=choice,
            ordered=decision,
        )

    @cached_property
    def decision(self) -> Decision:
        """The decision, which names nodes of the joint graph."""
        return self.ordered or self.lowered.decision(self.saved)

    @property
    def host_bytes(self) -> int:
        """Bytes of the offloaded values."""
        return sum(value.nbytes for value in self.decision.offloads)


#: Decisions for the first graphs of a step, one per graph: their summed saved bytes, their score, and the decisions.
Choice = tuple[int, int, tuple[Candidate, ...]]


def combine(
    options: Iterable[Sequence[Candidate]],
    extend: Callable[[int, int, int, Candidate], tuple[int, int] | None],
) -> list[Choice]:
    """Choose one decision for each graph of a step; return the Pareto-optimal choices by (saved bytes, score).

    Args:
        options: for each graph, its decisions.
        extend: function that adds the decision of one more graph to a choice for the graphs before it. Its
            arguments are the position of the graph in ``options``, the saved bytes and the score of the choice so
            far, and the decision. It returns the saved bytes and the score with the decision, or None if the
            decision cannot be added. A score is a number to minimise, such as a cost.

    Returns:
        Choices, fewest saved bytes first. A choice is a tuple of saved bytes, score, and one decision for each graph. A
        long list is thinned to some thousands of choices. The list is empty if no choice is possible.
    """
    best: list[Choice] = [(0, 0, ())]
    for k, candidates in enumerate(options):
        more = (
            (*figures, (*chosen, candidate))
            for saved, score, chosen in best
            for candidate in candidates
            if (figures := extend(k, saved, score, candidate)) is not None
        )
        best = pareto(more, lambda choice: choice[:2])
        every = max(1, len(best) // _CHOICES)
        # The last choice has the best score, so thinning must keep it.
        best = [*best[::every], *(best[-1:] if every > 1 else [])]
    return best
