"""Solve the graph problem with Lagrange multipliers, and search for decisions near the hull.

`remat.solvers.graph.hull` gives, for every capacity, a lower bound on the cost, a price of a byte, and a decision that
may leave bytes unused. Let the *total* of a decision be its cost plus the price of its bytes. The *loss* of a decision
is its total minus the least total of any decision. The compiled kernel enumerates decisions of little loss, node by
node in topological order. A *prefix* is a decision on the first nodes in topological order. The exact enumeration keeps
all prefixes of little loss. The beam search keeps a limited number of prefixes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from remat.solvers.base import Solver
from remat.solvers.effort import EFFORT
from remat.solvers.graph.hull import Edge, Hull
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.kernel import kernel
from remat.solvers.solution import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """The best decision found so far for the reduced problem (the *core*), its cost, and a lower bound on all costs.

    Attributes:
        saved: positions of the saved nodes in the core.
        cost: cost of the decision in the core, where nodes with ``in_forward`` False cost nothing.
        bound: lower bound on the cost of every decision within the capacity.
        by_clock: whether a time limit, not a limit on counted work, ended a search.
    """

    saved: tuple[int, ...]
    cost: int
    bound: int
    by_clock: bool = False

    @property
    def gap(self) -> float:
        """Difference between cost and lower bound, as a fraction of the cost."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Lagrangian(Solver):
    """Solver that computes minimum cuts at different prices of a byte, then enumerates decisions near the hull.

    Attributes:
        work: limit on the enumeration, in the kernel's units. A hundred million units take one to
            three seconds. With a limit of 0, only beam search runs, and on small graphs a short
            enumeration.
        gap: the difference between cost and lower bound at which to stop, as a fraction of the
            cost.
    """

    work: int = 100_000_000
    gap: float = EFFORT.gap

    name: ClassVar[str] = "lagrangian"
    requires: ClassVar[tuple[str, ...]] = ("scipy", "numpy")

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Choose the nodes to save; the answer also has a lower bound on the cost of any decision."""
        search = Search(problem, time_limit=time_limit)
        best = search.repair(search.start())
        return search.answer(search.exact(best, work=self.work, tolerance=self.gap))


class Search:
    """Search for cheap decisions of a graph problem near the lower convex hull of all decisions.

    Args:
        problem: the graph problem, with its capacity.
        time_limit: seconds from now until the searches stop; None: no clock, only work is counted.

    Raises:
        BudgetError: every decision saves more bytes than the capacity.
    """

    def __init__(self, problem: GraphProblem, *, time_limit: float | None = None) -> None:
        self.hull = Hull.of(problem)
        self.core = self.hull.core
        total = sum(problem.size)
        self.capacity = total if problem.capacity is None else min(problem.capacity, total)
        self.hull.check_capacity(self.capacity)
        self.edge: Edge = self.hull.edge(self.capacity)
        self.deadline = None if time_limit is None else time.monotonic() + time_limit

    def start(self) -> Incumbent:
        """Return the cheapest of the hull's vertices that fit the capacity, without a search."""
        fits = self.edge.fits
        return Incumbent(
            saved=fits.saved, cost=fits.cost, bound=min(fits.cost, self.edge.bound(self.capacity))
        )

    def repair(self, best: Incumbent, *, most: int = EFFORT.beam) -> Incumbent:
        """Run up to two beam searches that keep ``most`` prefixes; return the cheaper of their decision and ``best``.

        Without the kernel, ``best`` is returned unchanged.
        """
        for share in EFFORT.beam_losses:
            if best.gap <= EFFORT.gap or self.late() or kernel() is None:
                break
            # The beam's width limits the search, so the work needs no limit.
            best, _, _ = self._run(best, share=share, most=most, work=2**40)
        return best

    def exact(self, best: Incumbent, *, work: int, tolerance: float = EFFORT.gap) -> Incumbent:
        """Enumerate the decisions that could be cheaper than ``best``; return the cheapest one, or ``best`` if none is.

        The enumeration also raises the lower bound on the cost. The enumeration ends early if the gap falls to
        ``tolerance``, a fraction of the cost, or if a limit on work or time is reached. Without the kernel, ``best`` is
        returned unchanged.
        """
        # The limit on the loss grows in steps. A better decision found early makes later steps needless, and
        # each finished step proves a bound. All prefixes are kept: dropping one would void the proof.
        floor, share = max(1, self.edge.bound(self.capacity)), 0.0
        while kernel() is not None and best.gap > 0 and work > 0 and not self.late():
            all_of_it = (best.cost - floor) / floor
            enough = all_of_it - 0.99 * tolerance
            if share >= enough:
                break
            share = min(max(enough, 1e-5), max(4 * share, 2e-4))
            best, spent, complete = self._run(best, share=share, most=2**40, work=work)
            work -= spent
            if not complete or best.gap <= tolerance:
                break
        return best

    def _seconds_left(self) -> float:
        return 0.0 if self.deadline is None else max(1e-3, self.deadline - time.monotonic())

    def answer(self, best: Incumbent) -> Answer:
        """Convert a decision for the reduced problem to an answer for the whole problem."""
        # With optimal answers, a larger budget never leads to a higher cost.
        if len(self.core) <= EFFORT.small:
            best = self.exact(best, work=EFFORT.small_work, tolerance=0.0)
        by_clock = best.by_clock or (best.gap > 0 and self.late())
        return Answer(self.hull.reduction.invert(best.saved), best.bound, by_clock=by_clock)

    def late(self) -> bool:
        """Return whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _run(
        self, best: Incumbent, *, share: float, most: int, work: int
    ) -> tuple[Incumbent, int, bool]:
        """Enumerate decisions of little loss; return the best one, the work done, and whether all were enumerated."""
        edge = self.edge
        limit = int(max(1, edge.bound(self.capacity)) * share) * edge.scale
        improved, complete, saved_bytes, loss, saved, spent, by_clock = self.hull.compiled(
            edge
        ).run(self.capacity, limit, work, most, self._seconds_left())
        cost, proven = best.cost, best.bound
        if improved:
            cost = (edge.value + loss - edge.price * saved_bytes) // edge.scale
        if complete:  # all decisions that were not enumerated lose more than the limit
            proven = max(proven, -((edge.price * self.capacity - edge.value - limit) // edge.scale))
        better = improved and cost < best.cost
        cost = min(cost, best.cost)
        return (
            Incumbent(
                saved=tuple(saved) if better else best.saved,
                cost=cost,
                bound=min(cost, proven),
                by_clock=best.by_clock or by_clock,
            ),
            spent,
            complete,
        )
