"""The search for candidates of one graph within a peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from remat.errors import BudgetError
from remat.planning.context import VERTICES, GraphContext
from remat.planning.plan_text import learned_text
from remat.planning.search.bound import PeakBounds, bound_with_offloads
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT, Effort
from remat.planning.search.measures import Measures
from remat.planning.search.pool import CandidatePool, Limits
from remat.planning.search.proposers.offloads import Offloads
from remat.planning.search.proposers.orders import Orders
from remat.planning.search.proposers.prices import PriceSearch
from remat.planning.search.proposers.solver import SolverDecisions
from remat.planning.search.schedules import Schedules
from remat.solvers.lagrangian import Lagrangian
from remat.solvers.run import run
from remat.units import Budget, bytes_of_share, format_bytes

#: Number of limits on saved bytes that are tried to find the largest limit whose decision is within a peak.
CLOSING = 3
#: If the peak of the cheapest candidate is below this fraction of the limit, the solver is asked for decisions, too.
_SLACK = 0.97
#: A search that finds no decision within a limit is repeated with lower limits: these fractions of the limit, or the
#: first one alone if the graph has more than ``Effort.small`` nodes. A lower limit leads the search past other decisions.
_LOWER_LIMITS = (0.98, 0.99, 0.97, 0.95)
#: Text for error messages: why no budget lowers the peak further, and what else lowers it.
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget: raise it, or make the "
    "model or the batch smaller"
)


class Search:
    """Candidates of one graph within any peak, and what finds them.

    Args:
        context: the prepared graph.
        effort: limits on the work of each search.

    Attributes:
        context: the prepared graph.
        effort: limits on the work of each search.
        measures: peaks of the candidates.
        decisions: decisions of the solver at limits on saved bytes.
    """

    def __init__(self, context: GraphContext, effort: Effort = DEFAULT) -> None:
        self.context, self.effort = context, effort
        self.measures = Measures(context.state, context.on_step)
        self.decisions = SolverDecisions(context, self.measures)

    @cached_property
    def schedules(self) -> Schedules:
        """The decisions by the peaks of their schedules."""
        return Schedules(self.context)

    @cached_property
    def orders(self) -> Orders:
        """The search over node orders and recomputations."""
        return Orders(self.schedules)

    @cached_property
    def prices(self) -> PriceSearch:
        """The search by prices of memory."""
        return PriceSearch(self.schedules, self.effort)

    @cached_property
    def bounds(self) -> PeakBounds:
        """Lower bounds on the cost of decisions without offloads, within any peak."""
        return PeakBounds(self.context.state, self.context.lowered.problem)

    @cached_property
    def offloads(self) -> Offloads:
        """The search for values to offload."""
        return Offloads(self.context, self.measures, self.decisions, self.prices, self.orders)

    def adopt(self, other: Search) -> bool:
        """Copy what a search on another trace of the graph has decided and measured.

        Nothing is copied unless both have equal graphs, and equal options except the budget.

        Returns:
            Whether decisions and peaks were copied.
        """
        if not self.context.like(other.context):
            return False
        self.decisions.adopt(other.decisions)
        self.measures.adopt(other.measures)
        return True

    def limits(self, peak_bytes: int) -> Limits:
        """Return the limits of a candidate whose simulated peak is within ``peak_bytes``."""
        return Limits(
            peak_bytes=peak_bytes,
            saved_bytes=self.context.most_saved,
            measure=self.measures.simulated,
        )

    def within_peak(
        self, peak_bytes: int, *, least: int | None = None, offload: bool = True
    ) -> Candidate:
        """Return the cheapest candidate found whose simulated peak is within a limit.

        Args:
            peak_bytes: limit on the peak, in bytes.
            least: the peak of ratio 0, if the limit is a ratio of the peak. Candidates at the least peak compete then,
                too, so that a higher ratio does not cost more than ratio 0.
            offload: whether untagged values may be offloaded. Tagged values are offloaded in any case.

        Raises:
            BudgetError: no candidate was found within the limit; the message names the least peak that was found.
        """
        offloads = self.offloads
        if not (offload and self.context.may_offload):
            return offloads.with_tagged(self._within(peak_bytes, least))
        without: Candidate | None = None
        try:
            without = self._within(peak_bytes, least)
        except BudgetError:
            # Offloading cannot go below this bound.
            possible = peak_bytes >= self.schedules.least_possible
            found = offloads.with_offloads(peak_bytes, None) if possible else None
            if found is None:
                raise
        else:
            found = offloads.with_offloads(peak_bytes, without) or without
        found = offloads.with_tagged(found)
        tried = self.schedules.tried(found.saved)
        bound = bound_with_offloads(
            self.context, self.bounds, peak_bytes, self.schedules.highest(tried)
        )
        return replace(found, provenance=replace(found.provenance, recompute_bound=bound))

    def _within(self, peak_bytes: int, least: int | None) -> Candidate:
        """Return the cheapest candidate found within a peak, without offloads; arguments as in `within_peak`."""
        context, cheapest = self.context, self.decisions.allowed_cheapest
        if self.measures.simulated(cheapest) <= peak_bytes:
            return cheapest
        asked = f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes)"
        # Hooks may pack saved values into fewer bytes, so the bound on the peak does not hold with hooks.
        possible = 0 if context.request.hooks else self.schedules.least_possible
        if peak_bytes < possible:
            raise self._none_within(asked, possible, infeasible=True)
        context.on_step(f"searching within a peak of {format_bytes(peak_bytes)}")
        simulated = self.measures.simulated
        best = self._proposed(peak_bytes, least).cheapest(
            rank=lambda d: (d.cost, simulated(d), d.saved_bytes)
        )
        if best is None:
            raise self._none_within(asked, possible)
        return self._bounded(best, peak_bytes)

    def _proposed(self, peak_bytes: int, least: int | None) -> CandidatePool:
        """Return candidates within a peak, from several proposers. Arguments as in `within_peak`."""
        context, decisions = self.context, self.decisions
        limits = self.limits(peak_bytes)
        found = CandidatePool()

        def add(*more: Candidate | None) -> None:
            found.add(*(d for d in more if d is not None and limits.allow(d)))

        if context.is_alone:
            add(decisions.swept(limits), self.scheduled(peak_bytes, self.orders))
            return found
        add(self.searched(peak_bytes), decisions.allowed_full)
        if least is not None:
            add(self.least_peak)
        if context.request.hooks or not len(found):
            # Hooks pack saved values, so the peaks of the search differ from those of the step.
            add(self.least_peak, decisions.swept(limits))
            if cheapest := found.cheapest():
                add(self.searched(peak_bytes, cheapest))
            if not context.request.hooks:
                small = len(context.state.index) <= self.effort.small
                aims = (int(p * peak_bytes) for p in _LOWER_LIMITS[: None if small else 1])
                add(*(self.searched(a) for a in aims if a >= self.schedules.least_possible))
            return found
        best = found.cheapest()
        assert best is not None
        if least is not None and least < peak_bytes:
            lowest = self.schedules.tried(self.least_peak.saved)
            if self.bounds.bound(least, self.schedules.highest(lowest)) <= best.cost:
                # The search that ratio 0 makes, which may be cheaper.
                add(self.searched(least))
        best = found.cheapest() or best
        if best.cost and self.measures.simulated(best) < _SLACK * peak_bytes:
            # On some large graphs, the search ends far below the limit, and a decision of the solver is cheaper.
            below, above = _around(self._ends(), peak_bytes)
            low = below[0] if below else context.least_bytes
            high = above[0] if above and above[0] > low else context.full_bytes
            add(*decisions.bisected(low, high, peak_bytes, CLOSING, limits.measure))
        return found

    def _ends(self) -> list[tuple[int, int]]:
        """Return about `VERTICES` vertices of the hull, each as its saved bytes and its schedule's peak in bytes."""
        cuts = self.context.cuts(VERTICES)
        return [(nbytes, self.schedules.tried(saved).peak_bytes) for nbytes, saved in cuts]

    def scheduled(self, peak_bytes: int, orders: Orders) -> Candidate | None:
        """Ask the user's solver for a schedule within a peak of a step problem; return it as a candidate.

        Args:
            peak_bytes: limit on the peak in that step problem, in bytes.
            orders: holds the step problem that the solver gets.

        Returns:
            The candidate, whose peak may exceed the limit. None if the solver does not solve step problems, finds no
            schedule, or its schedule saves more bytes than the user's code allows.
        """
        request = self.context.request
        if "schedule" not in request.solver.solves or request.hooks:
            return None
        self.context.on_step(f"asking '{request.solver.name}' for a schedule")
        start = replace(self.least_peak, schedule=None)
        found = orders.solved(request.solver, start, peak_bytes, request.time_limit)
        may = found and self.context.may_save(found)
        if not (found and may):
            return None
        return self.decisions.informed(found, "scheduled by the solver")

    def _none_within(self, asked: str, possible: int, *, infeasible: bool = False) -> BudgetError:
        """Return the error for a limit on the peak within which no plan was found.

        Args:
            asked: the budget, as text.
            possible: lower bound on the peak of every schedule, in bytes; 0 if none is known.
            infeasible: whether the limit is below ``possible``.
        """
        context, least = self.context, self.least_found
        alive = f"{possible} bytes ({format_bytes(possible)})"
        if infeasible:
            why = (
                f", which is infeasible: every schedule of this step has a peak of at least {alive}"
            )
        else:
            whose = f" by '{context.request.solver.name}'" if context.is_alone else ""
            proven = (
                f"; it is proven only that no schedule has less than {alive}" if possible else ""
            )
            why = f", and no plan was found within it{whose}{proven}"
        held = ""
        if context.state.policies or (context.state.plain is not None and not context.state.chunk):
            named = context.state.policies or "by remat.region"
            held = f". All plans follow the policies {named}; others may lower the least peak"
        return BudgetError(
            f"{asked}{why}. The least peak of any plan found is {format_bytes(least)} ({least} bytes); "
            f"{context.request.how_to_run(least)}. {_UNSHRUNK}{held}{learned_text(context.state.index.nodes)}"
        )

    def peak_of(self, budget: Budget, ends: tuple[int, int] | None = None) -> int:
        """Convert a budget on the peak to bytes.

        Args:
            budget: a budget on the peak, in bytes or as a ratio.
            ends: peaks in bytes that the ratios 0 and 1 stand for; None: the least peak found, and the peak of the
                plan for budget 1.
        """
        if budget.peak_bytes is not None:
            return budget.peak_bytes
        full = self.decisions.allowed_full
        least, most = ends or (self.least_found, self.measures.simulated(full))
        return least + bytes_of_share(budget.peak_share or 0.0, most - least)

    @cached_property
    def least_found(self) -> int:
        """The least peak found, in bytes: of `least_peak`, the decision at budget 1, and the cheapest decision."""
        decisions = self.decisions
        found = self.least_peak, decisions.allowed_cheapest, decisions.allowed_full
        return min(map(self.measures.simulated, found))

    @cached_property
    def least_peak(self) -> Candidate:
        """The candidate with the least peak that was found.

        With the solver ``auto``, remat searches for this candidate. If the user named another solver, this is its
        decision with the least peak, of those at several limits on saved bytes.
        """
        context, decisions = self.context, self.decisions
        found = CandidatePool([decisions.allowed_full])
        if context.is_alone:
            found.add(*decisions.on_frontier())
        else:
            starts = [*(saved for _, saved in context.cuts(4 * VERTICES)), *self._starts(0)]
            if context.request.hooks:
                # The search counts the bytes of values before packing, so its lowest peak may not be the lowest one
                # with hooks. Therefore, decisions at several limits on saved bytes compete, too.
                lowest = [
                    self._by_prices(Limits(peak_bytes=0, saved_bytes=context.most_saved), starts)
                ]
                found.add(*decisions.on_frontier())
            else:
                lowest = self.lowest(self.prices, self.orders, starts)
            found.add(*map(decisions.informed, lowest))
        simulated = self.measures.simulated
        allowed = Limits(saved_bytes=context.most_saved)
        best = found.cheapest(allowed, lambda d: (simulated(d), d.cost))
        assert best is not None, "the decision at budget 1 is allowed"
        return best

    def lowest(
        self, prices: PriceSearch, orders: Orders, starts: Iterable[Iterable[int]]
    ) -> list[Candidate]:
        """Search for the candidate with the least peak.

        Args:
            prices: the search by prices.
            orders: the search over node orders of the same step problem.
            starts: decisions to start from, each as its saved nodes of the graph problem; at least one.

        Returns:
            One or two candidates. First, the best one in the node order of the passes. Second, if one was found, the
            best one with node orders of its own, which may save more bytes than the user's code allows.
        """
        # No schedule has a peak of 0 bytes, so under this limit the search returns the lowest peaks that it reaches.
        limits = Limits(peak_bytes=0, saved_bytes=self.context.most_saved)
        reached = CandidatePool(prices.reached(limits, starts))
        best, lower = reached.cheapest(rank=limits.rank), orders.lowest(reached)
        return [d for d in (best, lower) if d is not None]

    def searched(
        self, peak_bytes: int, *starts: Candidate, capacity: int | None = None
    ) -> Candidate | None:
        """Search for a candidate whose peak is within a limit: first by prices of memory, then by other node orders.

        Args:
            peak_bytes: limit on the peak, in bytes.
            starts: candidates to start from, in addition to those of `_starts`.
            capacity: most bytes that the candidate may save; None: no such limit.

        Returns:
            The cheapest candidate found within the limits; None if none was found.
        """
        allowed = [c for c in (capacity, self.context.most_saved) if c is not None]
        most = min(allowed, default=None)
        saved = [*(s.saved for s in starts), *self._starts(peak_bytes)]
        tried = self._by_prices(Limits(peak_bytes=peak_bytes, saved_bytes=most), saved)
        found = CandidatePool([self.decisions.informed(tried)])
        if not self.context.request.hooks:
            found.add(*map(self.decisions.informed, self.orders.within(tried, peak_bytes)))
        limits = replace(self.limits(peak_bytes), saved_bytes=most)
        best = found.cheapest(limits, lambda d: d.cost)
        return None if best is None else self._bounded(best, peak_bytes)

    def _by_prices(self, limits: Limits, starts: Iterable[Iterable[int]]) -> Candidate:
        """Search by prices; see `PriceSearch.within`."""
        return self.prices.within(limits, starts, orders=self.orders.is_possible)

    def _bounded(self, found: Candidate, peak_bytes: int) -> Candidate:
        """Return a copy of a candidate with a lower bound in its provenance.

        No decision whose peak is at most ``peak_bytes`` costs less than the bound. With hooks on saved tensors, the
        bound is 0, because hooks may change the bytes of saved values.
        """
        # The bound that `found` has may hold for a limit on saved bytes, so it does not hold for a peak.
        bound = 0
        if not self.context.request.hooks:
            tried = self.schedules.tried(found.saved)
            bound = self.bounds.bound(peak_bytes, self.schedules.highest(tried))
        return replace(found, provenance=replace(found.provenance, recompute_bound=bound))

    def _starts(self, peak_bytes: int) -> list[tuple[int, ...]]:
        """Return the decisions from which each search within a peak starts, each as its saved nodes."""
        decisions = self.decisions
        found = decisions.allowed_cheapest, decisions.allowed_full, self.context.runtime_optimal
        cuts = (saved for _, saved in self.context.cuts(VERTICES))
        return [*(d.saved for d in found), *self._closing_in(peak_bytes), *cuts]

    def _near(self, capacity: int) -> tuple[int, ...]:
        """Return the saved nodes of a good decision within ``capacity`` saved bytes, without a proof of optimality."""
        # The decision is only a start of a search.
        return run(Lagrangian(work=0), self.context.lowered.problem.within(capacity)).saved

    def _closing_in(self, peak_bytes: int) -> Iterator[tuple[int, ...]]:
        """Yield decisions at limits on saved bytes that approach the largest limit whose decision is within a peak.

        The limits lie between the last vertex of the hull within the peak and the next vertex. False position (regula
        falsi) and bisection propose them in turn. If no vertex is within the peak, a few intervals beside the vertex
        with the least peak are halved first.

        Args:
            peak_bytes: limit on the peak, in bytes.

        Yields:
            The saved nodes of a decision.
        """
        tried, ends = self.schedules.tried, self._ends()
        # Between two vertices that are far apart, decisions may have lower peaks than at both.
        for _ in range(2 * CLOSING):
            lowest = min(range(len(ends)), key=lambda i: ends[i][1])
            if ends[lowest][1] <= peak_bytes or len(ends) < 2:
                break
            beside = [i for i in (lowest - 1, lowest) if 0 <= i < len(ends) - 1]
            at = max(beside, key=lambda i: ends[i + 1][0] - ends[i][0])
            capacity = (ends[at][0] + ends[at + 1][0]) // 2
            saved = self._near(capacity)
            yield saved
            ends.insert(at + 1, (capacity, tried(saved).peak_bytes))
        low, high = _around(ends, peak_bytes)
        if low is None or high is None:
            return
        for turn in range(CLOSING):
            if high[0] - low[0] <= max(1, low[0] // 500):
                return
            share = (peak_bytes - low[1]) / max(1, high[1] - low[1]) if turn % 2 == 0 else 0.5
            # The ratio is clamped, because false position may otherwise stay at one end of the interval.
            capacity = low[0] + int(min(max(share, 0.05), 0.95) * (high[0] - low[0]))
            saved = self._near(capacity)
            yield saved
            peak = tried(saved).peak_bytes
            low, high = ((capacity, peak), high) if peak <= peak_bytes else (low, (capacity, peak))


def _around(
    ends: list[tuple[int, int]], peak_bytes: int
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return the last pair whose peak is within ``peak_bytes``, and the pair after it; None for a missing pair.

    Args:
        ends: pairs of saved bytes and peak bytes, fewest saved bytes first.
        peak_bytes: limit on the peak, in bytes.
    """
    last = max((k for k, (_, peak) in enumerate(ends) if peak <= peak_bytes), default=-1)
    return ends[last] if last >= 0 else None, ends[last + 1] if ends[last + 1 :] else None
