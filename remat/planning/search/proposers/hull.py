"""Propose decisions from which searches start: vertices of the hull, and decisions between two vertices."""

from __future__ import annotations

from collections.abc import Iterator

from remat.planning.context import GraphContext
from remat.planning.search.effort import DEFAULT
from remat.planning.search.proposers.solver import SolverDecisions
from remat.planning.search.schedules import Schedules
from remat.solvers.graph.lagrangian import Lagrangian
from remat.solvers.run import run


class Starts:
    """Decisions on one prepared graph from which searches start.

    Args:
        context: the prepared graph.
        decisions: decisions of the solver.
        schedules: the decisions of the graph, by the peaks of their schedules.
    """

    def __init__(
        self, context: GraphContext, decisions: SolverDecisions, schedules: Schedules
    ) -> None:
        self._context, self._decisions, self._schedules = context, decisions, schedules

    def search_within(self, peak_bytes: int) -> list[tuple[int, ...]]:
        """Return the decisions from which searches within a peak start, each as a tuple of saved nodes."""
        decisions, context = self._decisions, self._context
        decided = (
            decisions.allowed_cheapest,
            decisions.allowed_at_budget_one,
            context.runtime_optimal,
        )
        cuts = (saved for _, saved in context.cuts(DEFAULT.vertices))
        return [*(d.saved for d in decided), *self._closing_in(peak_bytes), *cuts]

    def between(self, peak_bytes: int) -> tuple[int, int]:
        """Return the saved bytes of the hull's last vertex within a peak, and those of the next vertex."""
        # The least bytes of any plan stand for a missing vertex before, and those of budget 1 for one after.
        below, above = _around(self._ends(), peak_bytes)
        low = below[0] if below else self._context.least_bytes
        return low, above[0] if above and above[0] > low else self._context.full_bytes

    def _ends(self) -> list[tuple[int, int]]:
        """Return about `Effort.vertices` vertices of the hull, each as a pair of saved bytes and peak in bytes."""
        cuts = self._context.cuts(DEFAULT.vertices)
        return [(nbytes, self._schedules.candidate(saved).peak_bytes) for nbytes, saved in cuts]

    def _near(self, capacity: int) -> tuple[int, ...]:
        """Return the saved nodes of a good decision within ``capacity`` saved bytes, without a proof of optimality."""
        # The decision is only a start of a search.
        return run(Lagrangian(work=0), self._context.lowered.problem.within(capacity)).saved

    def _closing_in(self, peak_bytes: int) -> Iterator[tuple[int, ...]]:
        """Yield decisions at limits on saved bytes that approach the largest limit whose decision is within a peak."""
        candidate, ends = self._schedules.candidate, self._ends()
        # Between two vertices that are far apart, decisions may have lower peaks than at both.
        for _ in range(2 * DEFAULT.closing):
            lowest = min(range(len(ends)), key=lambda i: ends[i][1])
            if ends[lowest][1] <= peak_bytes or len(ends) < 2:
                break
            edges = [i for i in (lowest - 1, lowest) if 0 <= i < len(ends) - 1]
            at = max(edges, key=lambda i: ends[i + 1][0] - ends[i][0])
            capacity = (ends[at][0] + ends[at + 1][0]) // 2
            saved = self._near(capacity)
            yield saved
            ends.insert(at + 1, (capacity, candidate(saved).peak_bytes))
        low, high = _around(ends, peak_bytes)
        if low is None or high is None:
            return
        for index in range(DEFAULT.closing):
            if high[0] - low[0] <= max(1, low[0] // DEFAULT.aiming.close):
                return
            # False position (regula falsi) and bisection propose limits in turn.
            share = (peak_bytes - low[1]) / max(1, high[1] - low[1]) if index % 2 == 0 else 0.5
            # The ratio is clamped, because false position may otherwise stay at one end of the interval.
            capacity = low[0] + int(min(max(share, 0.05), 0.95) * (high[0] - low[0]))
            saved = self._near(capacity)
            yield saved
            peak = candidate(saved).peak_bytes
            low, high = ((capacity, peak), high) if peak <= peak_bytes else (low, (capacity, peak))


def _around(
    ends: list[tuple[int, int]], peak_bytes: int
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return the last pair (saved bytes, peak) within ``peak_bytes`` and the pair after it; None if missing."""
    last = max((k for k, (_, peak) in enumerate(ends) if peak <= peak_bytes), default=-1)
    return ends[last] if last >= 0 else None, ends[last + 1] if ends[last + 1 :] else None
