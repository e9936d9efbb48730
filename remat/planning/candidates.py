"""Candidates: decisions on one graph with their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self, TypeVar

from remat.graph.lowering import Decision, Lowered
from remat.passes.core.choice import DecisionInfo

T = TypeVar("T")
#: Choices for several graphs that are weighed up at once: more tell nothing apart.
_CHOICES = 2_000
_UNKNOWN = DecisionInfo()


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A decision on one graph and its figures.

    The peaks of the step that it makes are measured by `remat.planning.prepared.Prepared`, each once.

    Attributes:
        lowered: the graph problem.
        saved: what it saves, by positions in the graph problem.
        saved_bytes: bytes of that.
        cost: cost of what runs twice, and exposed transfer time, in the unit of the cost model.
        choice: how it came about.
        ordered: the decision, where it has orders or offloads.
        schedule: the schedule behind its orders: runs of the step problem, and the position of backward's first.
        alive: bytes at each moment of its schedule, where a search looked at that.
        peak_bytes: peak of its step, in bytes: simulated where that was asked for, else of its schedule; 0 where
            nobody looked.
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
        """Build a candidate from a decision of another planner or one with node orders; offloaded values are not saved."""
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
        """Saved values, by their names in the joint graph."""
        return self.ordered or self.lowered.decision(self.saved)


def pareto(found: Iterable[T], of: Callable[[T], tuple[int, int]]) -> list[T]:
    """Candidates on the Pareto front of (bytes, cost), fewest bytes first."""
    best: list[T] = []
    for t in sorted(found, key=of):
        if not best or of(t)[1] < of(best[-1])[1]:
            best.append(t)
    return best


#: One decision for each graph of a step so far: the bytes that they save, their score, and the decisions.
Choice = tuple[int, int, tuple[Candidate, ...]]


def combine(
    options: Iterable[Sequence[Candidate]],
    extend: Callable[[int, int, int, Candidate], tuple[int, int] | None],
) -> list[Choice]:
    """Choose one decision for each graph of a step: all Pareto-optimal choices, fewest bytes first.

    Args:
        options: the decisions of each graph.
        extend: bytes and score of a choice with one decision more, given the place of its graph, the bytes and
            score so far, and the decision; None if that decision cannot be added.
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
        best = [*best[::every], *(best[-1:] if every > 1 else [])]
    return best
