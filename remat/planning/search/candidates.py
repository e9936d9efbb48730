"""Candidates: decisions what to save in one graph, with saved bytes, costs and peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from remat.graph.problems.lowering import Decision, Lowered
from remat.passes.core.provenance import Provenance, SavedLimits
from remat.planning.search.effort import DEFAULT
from remat.solvers.graph.pareto import pareto

_UNKNOWN = Provenance()
#: How a candidate was found whose values to offload a search chose.
WITH_OFFLOADS = "with offloads"


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A decision what to save in one graph, with saved bytes, cost and, if known, peak.

    Attributes:
        lowered: the graph problem, and the map from its nodes to the joint graph.
        saved: positions of the saved nodes in the graph problem.
        saved_bytes: bytes of the saved nodes, without offloaded values.
        cost: recompute cost plus ``exposed_time``, in the unit of the cost model.
        exposed_time: time that the step waits for copies to and from the host, in the unit of the cost model.
        provenance: which search found the decision, and a lower bound on the cost.
        limits: the limits on saved bytes under which the decision was made; None: it was searched within a peak.
        ordered: the decision in full. If None, ``saved`` is the whole decision, without node orders and offloads.
        schedule: the schedule that the node orders were read from, as a pair. First, for each run in order,
            the node of the schedule problem that runs. Second, the position of the first run of backward among
            the runs. None if no search over schedules found the decision.
        alive: most bytes alive at each program point of the schedule. Keys are positions of nodes in the joint
            graph; key -1 holds the saved bytes. Empty if no search by peak evaluated the schedule.
        peak_bytes: simulated peak of the step, in bytes. If the step was not simulated: peak of the schedule, or 0 if
            unknown.
    """

    lowered: Lowered = field(repr=False)
    saved: tuple[int, ...]
    saved_bytes: int
    cost: int
    exposed_time: int = 0
    provenance: Provenance = _UNKNOWN
    limits: SavedLimits | None = None
    ordered: Decision | None = None
    schedule: tuple[Sequence[int], int] | None = field(default=None, repr=False)
    alive: Mapping[int, int] = field(default_factory=dict, repr=False)
    peak_bytes: int = 0

    @classmethod
    def of(cls, lowered: Lowered, decision: Decision, cost: int, **more: Any) -> Self:
        """Build a candidate from a `Decision` and its cost; ``more`` gives the values of further attributes."""
        saved, size = lowered.saved_of(decision), lowered.problem.size
        return cls(
            lowered=lowered,
            saved=saved,
            # An offloaded value is saved in the host's memory.
            saved_bytes=sum(size[i] for i in saved) - sum(o.nbytes for o in decision.offloads),
            cost=cost,
            ordered=decision,
            **more,
        )

    @cached_property
    def decision(self) -> Decision:
        """The candidate's decision in full: saved nodes, node orders and offloads, as node names of the joint graph."""
        return self.ordered or self.lowered.decision(self.saved)

    def with_provenance(self, **changes: Any) -> Self:
        """Return a copy of the candidate in which the given fields of ``provenance`` are replaced."""
        return replace(self, provenance=replace(self.provenance, **changes))

    @property
    def key(self) -> Decision | tuple[int, ...]:
        """Hashable key that is unique for each decision on one graph."""
        return self.ordered or self.saved

    @property
    def offloads_more(self) -> bool:
        """Whether a search chose values to offload, besides the values that the user tags."""
        return self.provenance.proposer == WITH_OFFLOADS

    @property
    def host_bytes(self) -> int:
        """Bytes that the candidate's offloaded values take in the host's memory."""
        return sum(value.host_bytes for value in self.decision.offloads)


@dataclass(frozen=True, kw_only=True, eq=False)
class Together:
    """One candidate for each graph of a step; together they are a candidate for the whole step.

    Attributes:
        each: the candidates, in the order in which the graphs run forward.
        cost: the cost that the candidates add to all runs of their graphs.
        saved_bytes: bytes that all runs of all graphs save together, without activations that graphs pass to one
            another.
        peak_bytes: 0, because only the split graphs tell the peak of the step.
    """

    each: tuple[Candidate, ...]
    cost: int
    saved_bytes: int
    peak_bytes: int = 0

    @property
    def key(self) -> tuple[Decision, ...]:
        """The decisions of all graphs of the step, which identify the candidate."""
        return tuple(d.decision for d in self.each)

    decision = key

    @property
    def offloads_more(self) -> bool:
        """Whether a search chose values of a graph to offload, besides the values that the user tags."""
        return any(d.offloads_more for d in self.each)


#: One decision for each of the first graphs of a step: summed saved bytes, score (see `combine`), and the decisions.
Combination = tuple[int, int, tuple[Candidate, ...]]


def combine(
    options: Iterable[Sequence[Candidate]],
    extend: Callable[[int, int, int, Candidate], tuple[int, int] | None],
) -> list[Combination]:
    """Combine one decision for each graph; return combinations that are Pareto-optimal by saved bytes and by score.

    Args:
        options: for each graph, its decisions.
        extend: function that adds the decision of one more graph to a combination for the graphs before it. Its
            arguments are the position of the graph in ``options``, the saved bytes and the score of the combination so
            far, and the decision. The function returns the saved bytes and the score with the decision, or None if the
            decision cannot be added. A score is a number to minimise, such as a cost.

    Returns:
        Combinations, fewest saved bytes first. A combination is a tuple of saved bytes, score, and one decision for
        each graph. Of more than some thousand combinations, evenly spaced ones are returned. The list is empty if
        ``extend`` allows no combination.
    """
    best: list[Combination] = [(0, 0, ())]
    for k, candidates in enumerate(options):
        more = (
            (*figures, (*chosen, candidate))
            for saved, score, chosen in best
            for candidate in candidates
            if (figures := extend(k, saved, score, candidate)) is not None
        )
        best = pareto(more, lambda combination: combination[:2])
        every = max(1, len(best) // DEFAULT.several.combinations)
        # The last combination has the best score, so thinning must keep it.
        best = [*best[::every], *(best[-1:] if every > 1 else [])]
    return best
