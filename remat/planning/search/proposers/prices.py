"""Propose minimum cuts under prices of memory; the prices rise where the step exceeds the limit on the peak.

The limit on the peak is replaced by prices (Lagrange multipliers): each byte that is alive at a program point costs the
price of this point. Under given prices, the best decision is a minimum cut. A subgradient search with Polyak's step
size raises the prices at the points where the step exceeds the peak. Afterwards, the best decision within the peak is
changed to save further values, one at a time. If no decision is within the peak, the search is repeated with
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import Effort
from remat.planning.search.pool import CandidatePool, Limits
from remat.planning.search.proposers.checkpoints import checkpoint_sets, checkpointed
from remat.planning.search.proposers.cuts import Cuts, Prices
from remat.planning.search.proposers.fill import filled, repaired
from remat.planning.search.schedules import Schedules


class PriceSearch:
    """Search for decisions on one prepared graph by prices of memory, in the node order of the passes.

    Args:
        schedules: the decisions of the graph, by the peaks of their schedules.
        effort: limits on the work of one search.
    """

    def __init__(self, schedules: Schedules, effort: Effort) -> None:
        self.schedules, self._effort = schedules, effort
        self._last = 0  # evaluations up to which the current search may go on

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self.schedules)

    @cached_property
    def _checkpoints(self) -> list[frozenset[int]]:
        return checkpoint_sets(self.schedules, self._effort.segments)

    def reached(self, limits: Limits, starts: Iterable[Iterable[int]]) -> list[Candidate]:
        """Search for decisions by prices of memory, and again with checkpoints if no decision is within the limits.

        Args:
            limits: the limits, by the peak of the schedule.
            starts: decisions to start from, each as its saved nodes of the graph problem; at least one. The peaks of
                these decisions may exceed the limit.

        Returns:
            The best candidate of each search: the cheapest one found within the limits or, if there is none, the one
            that exceeds the limits least.
        """
        schedules, effort = self.schedules, self._effort
        # Only new evaluations count against the limit, because cached ones take no time.
        self._last = len(schedules.seen) + effort.evaluations(len(schedules.context.state.index))
        evaluated = [schedules.candidate(start) for start in starts]
        candidates = [self._priced(limits, CandidatePool(evaluated).best(limits.rank))]
        if limits.excess(candidates[0]):
            # A cut recomputes values where backward first needs any of them, so far from the loss it frees memory
            # only between checkpoints.
            sets = checkpointed(self._cuts, limits, self._checkpoints)
            candidates += [self._priced(limits, first, checkpoints) for checkpoints, first in sets]
        if limits.saved_bytes is not None and all(map(limits.excess, candidates)):
            candidates += [repaired(schedules, b, limits, effort, self._spent) for b in evaluated]
        return candidates

    def search_within(
        self, limits: Limits, starts: Iterable[Iterable[int]], *, orders: bool
    ) -> Candidate:
        """Search by prices of memory, then save further values in the best candidate; return the improved candidate.

        Args:
            limits: as in `reached`.
            starts: as in `reached`.
            orders: whether the caller searches node orders from the result, which lowers the cost further.
        """
        best = CandidatePool(self.reached(limits, starts)).best(limits.rank)
        large = len(self.schedules.context.state.index) > self._effort.large
        if limits.excess(best) or (large and orders):
            return best  # a search over node orders saves further values, too, and is faster on large graphs
        return filled(self.schedules, best, limits, self._effort, self._spent)

    def _priced(
        self, limits: Limits, best: Candidate, checkpoints: frozenset[int] = frozenset()
    ) -> Candidate:
        """Search for a better candidate than ``best`` by minimum cuts under prices; return the best candidate."""
        # Polyak's step needs the optimal cost, which is unknown. The cost of the best candidate is used instead, or
        # twice this cost if the candidate exceeds the limits.
        most = max(1, best.cost if not limits.excess(best) else 2 * best.cost)
        prices: Prices = {}
        step_size, idle = 1.0, 0
        for _ in range(self._effort.cuts[bool(checkpoints)]):
            candidate = self._cuts.at(prices, checkpoints)
            if limits.rank(candidate) < limits.rank(best):
                best, idle = candidate, 0
                if not limits.excess(best):
                    most = max(1, best.cost)
            else:
                # As usual in subgradient searches, halve the step after four cuts without progress.
                idle += 1
                if idle % 4 == 0:
                    step_size /= 2
            moved = self._cuts.moved(prices, candidate, limits, most, step_size)
            if moved is None or self._spent():
                break
            prices = moved
        return best

    def _spent(self) -> bool:
        """Return whether the current search has used up its number of evaluations."""
        return len(self.schedules.seen) > self._last
