"""The pool, which collects the candidates that a search finds, and chooses the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from remat.planning.search.candidates import Candidate, Together
from remat.solvers.graph.pareto import pareto

#: A candidate of a pool: for one graph, or for all graphs of a step.
T = TypeVar("T", bound=Candidate | Together)
#: A function that returns a peak of a candidate in bytes.
Measure = Callable[[Any], int]
#: A sort key of candidates; the least is the best.
Rank = Callable[[Any], Any]


def scheduled_peak(candidate: Candidate | Together) -> int:
    """Return the peak of a candidate's schedule, which is computed faster than other peaks."""
    return candidate.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that a search sets on the peak, the saved bytes and the cost of a candidate.

    Attributes:
        peak_bytes: limit on the peak by ``measure``, in bytes.
        saved_bytes: limit on the saved bytes; None: no limit.
        cost: limit on the cost.
        measure: function that returns the peak of a candidate.
        offload: whether a search may have chosen values to offload, in addition to tagged ones.
        without: decisions to leave out, such as those that were compiled.
    """

    peak_bytes: float = math.inf
    saved_bytes: int | None = None
    cost: float = math.inf
    measure: Measure = scheduled_peak
    offload: bool = True
    without: Container[Any] = ()

    def at(self, program_point: int) -> float:
        """Return the limit on bytes alive at ``program_point``; for -1, return the limit on saved bytes."""
        if program_point >= 0:
            return self.peak_bytes
        return math.inf if self.saved_bytes is None else self.saved_bytes

    def excess(self, candidate: Candidate | Together) -> float:
        """Return a candidate's bytes above the limit on the peak plus its bytes above the limit on saved bytes."""
        over = max(0, self.measure(candidate) - self.peak_bytes)
        return (
            over
            if self.saved_bytes is None
            else over + max(0, candidate.saved_bytes - self.saved_bytes)
        )

    def allow(self, candidate: Candidate | Together) -> bool:
        """Return whether a candidate is within the limits."""
        # What costs nothing to test comes first: a measure may have to split the graph.
        return (
            candidate.cost <= self.cost
            and (self.saved_bytes is None or candidate.saved_bytes <= self.saved_bytes)
            and (self.offload or not candidate.offloads_more)
            and (not self.without or candidate.decision not in self.without)
            and (self.peak_bytes == math.inf or self.measure(candidate) <= self.peak_bytes)
        )

    def rank(self, candidate: Candidate | Together) -> tuple[float, int]:
        """Return a candidate's sort key (bytes above the limits, cost), which is least for the best candidate."""
        return self.excess(candidate), candidate.cost


def cost_of(candidate: Candidate | Together) -> int:
    """Return a candidate's cost as the only sort key, so that the first of equally cheap candidates is best."""
    return candidate.cost


def by_cost(candidate: Candidate | Together) -> tuple[int, int, int]:
    """Return a candidate's sort key (cost, peak of the schedule, saved bytes)."""
    return candidate.cost, candidate.peak_bytes, candidate.saved_bytes


class CandidatePool(Generic[T]):
    """Set of candidates of one graph, or of all graphs of a step, at most one for each decision.

    Args:
        candidates: the candidates that the pool contains at first.
    """

    def __init__(self, candidates: Iterable[T] = ()) -> None:
        self._candidates: dict[Hashable, T] = {}
        self.add(*candidates)

    def __iter__(self) -> Iterator[T]:
        return iter(self._candidates.values())

    def __len__(self) -> int:
        return len(self._candidates)

    def add(self, *candidates: T) -> None:
        """Add candidates to the pool, except those whose decision is in the pool already."""
        for candidate in candidates:
            self._candidates.setdefault(candidate.key, candidate)

    def cached(self, saved: tuple[int, ...]) -> T | None:
        """Return the pool's candidate that saves the nodes ``saved`` in the passes' node order, or None."""
        return self._candidates.get(saved)

    def within(self, limits: Limits) -> list[T]:
        """Return the candidates of the pool within limits, in the order in which they were added."""
        return [d for d in self if limits.allow(d)]

    def cheapest(self, limits: Limits = Limits(), rank: Rank = by_cost) -> T | None:
        """Return the best candidate of the pool within limits; None if no candidate is within them.

        Args:
            limits: the limits.
            rank: the sort key whose least candidate is the best: the cheapest one, unless another key is given.
        """
        # Best first, because a measure may have to split the graph.
        return next(filter(limits.allow, sorted(self, key=rank)), None)

    def best(self, rank: Rank) -> T:
        """Return the candidate of least ``rank``; the pool must not be empty."""
        return min(self, key=rank)

    def pareto(self, measure: Measure = scheduled_peak) -> list[T]:
        """Return the Pareto-optimal candidates by (peak, cost), lowest peak first."""
        return pareto(self, lambda d: (measure(d), d.cost))
