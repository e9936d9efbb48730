"""Decide one prepared graph by the peak of its step: within one peak, or over all peaks, which gives a frontier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from remat.errors import BudgetError
from remat.passes.decide.budgeted import RegionBudget
from remat.planning.candidates import Candidate
from remat.planning.offload_planner import OffloadPlanner
from remat.planning.peak_frontier import FEW_RUNS, PeakFrontier, by_peak
from remat.planning.peak_search import PeakSearch
from remat.planning.plan_text import learned_text
from remat.planning.prepared import VERTICES
from remat.solvers.auto import is_auto
from remat.solvers.lagrangian import Lagrangian
from remat.solvers.pareto import pareto
from remat.solvers.run import run
from remat.units import (
    Budget,
    bytes_of_share,
    format_bytes,
)

#: About how many vertices of the hull (see `PeakPlanner`) a frontier by peak starts from.
MOST_CUTS = 40
#: If the plans of a frontier have at most this many nodes together, each plan is split and its peak is simulated.
SIMULATED = 400_000
#: A frontier by peak includes a search for the least peak if the step has at most this many operators to run. On larger
#: steps, this search takes several times as long as the rest of the frontier.
LEAST_RUNS = 2_000
#: Number of limits on saved bytes that are tried to find the largest limit whose decision is within a peak.
CLOSING = 3
#: The range from the least peak to the frontier's lowest peak is divided into this number of parts. Node orders are
#: searched at the peaks between the parts.
_TO_LEAST = 6
#: Offloading is tried at about the first number of a frontier's peaks, and at some lower peaks. For the latter, the
#: range from the least possible peak to the frontier's lowest peak is divided into the second number of parts.
_OFFLOADED, _BELOW = 12, 4
#: If the peak of the cheapest candidate is below this fraction of the limit, the solver is asked for decisions, too.
_SLACK = 0.97
#: A search that finds no decision within a limit is repeated with lower limits: these fractions of the limit, or the
#: first one alone if the graph has more than `LEAST_RUNS` nodes. A lower limit leads the search past other decisions.
_LOWER_LIMITS = (0.98, 0.99, 0.97, 0.95)
#: Text for error messages: why no budget lowers the peak further, and what else lowers it.
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget: raise it, or make the "
    "model or the batch smaller"
)


class PeakPlanner(OffloadPlanner):
    """Planner that decides one prepared graph by the peak of its step.

    The *graph problem* asks which nodes to save. The *hull* is the lower convex hull of its (saved bytes, recompute
    cost) pairs. The *step problem* asks which node runs when, and how often; its solution is a schedule. *Budget 1*
    allows the bytes that the runtime-optimal partition saves: the minimum cut that recomputes only cheap operators.
    """

    #: Peaks in bytes that the ratios 0 and 1 of the request's budget stand for. None: the least peak that this planner
    #: finds, and the peak of its plan for budget 1. Planners of the same step with other chunks share these peaks.
    ends: tuple[int, int] | None = None

    def frontier_by_peak(self) -> tuple[list[Candidate], tuple[tuple[int, int], ...]]:
        """Return the Pareto-optimal decisions by (peak, cost), and a proven lower bound on the cost at each peak.

        Peaks are simulated. If a large graph has many decisions, peaks are computed from the decisions' schedules
        instead, which may differ by the bytes of a few scalars. For a step of up to `LEAST_RUNS` operators, the lowest
        peak is at most the least peak that `within_peak` finds. If values may be offloaded, offloading is tried at some
        of the peaks and below the lowest of them.

        Returns:
            The decisions, lowest peak first; and the bound, as vertices (peak bytes, cost) of a line below which no
            decision lies, lowest peak first.
        """
        bound = self.bound_with_offloads if self.may_offload else self.bounds.bound
        search = PeakFrontier(self.state, self.lowered)
        cuts = [saved for _, saved in self.cuts(MOST_CUTS)]
        if self.is_alone:
            own = [
                self.simulated(d)
                for d in (self.allowed_full, *map(self.at, self.capacities(self.most_saved)))
            ]
            line = search.bound(bound, cuts)
            return self._above(line, own), line
        others = (self.full.saved, self.runtime_optimal.saved)
        found = search.found([*cuts, *others], self.on_step)
        self.on_step("proving bounds")
        line = search.bound(bound, cuts)
        decided = [self.informed(f) for f in found]
        if len(found) * len(self.state.index) <= SIMULATED:
            decided = [self.simulated(d) for d in decided]
        if len(search.step.problem.runnable) <= LEAST_RUNS:
            lowest = self.simulated(self._within(Budget(peak_share=0.0), self.least_found))
            least = lowest.peak_bytes
            first = next((f for f in found if not f.ordered), None)
            room = found[0].peak_bytes - least
            if first and room > 0 and len(search.step.problem.runnable) <= FEW_RUNS:
                self.on_step("searching orders down to the least peak")
                aims = (least + room * k // _TO_LEAST for k in range(1, _TO_LEAST))
                orders = (d for aim in aims for d in search.reordered(first, aim))
                decided += [self.simulated(self.informed(d)) for d in orders]
            decided.append(lowest)
        if self.may_offload:
            frontier = pareto(decided, by_peak)
            decided += self._cheaper_with_offloads(frontier, search.least_possible)
        return self._above(line, decided), line

    def simulated(self, decided: Candidate) -> Candidate:
        """Return a copy of a candidate with the simulated peak of its step as ``peak_bytes``."""
        return replace(decided, peak_bytes=self.peak(decided))

    def _above(self, line: tuple[tuple[int, int], ...], found: list[Candidate]) -> list[Candidate]:
        """Record the lower bound in each candidate's ``choice``; return the Pareto-optimal ones, lowest peak first.

        First, tagged values of the candidates are offloaded.

        Args:
            line: vertices (peak bytes, cost) of a line below which no decision lies, lowest peak first.
            found: the candidates.
        """
        tagged = [(d, self.with_tagged(d)) for d in found]
        found = [d if d is new else self.simulated(new) for d, new in tagged]
        made = []
        for d in found:
            bound = next((cost for peak, cost in line if peak >= d.peak_bytes), 0)
            made.append(replace(d, choice=replace(d.choice, recompute_bound=bound)))
        return pareto(made, by_peak)

    def _cheaper_with_offloads(
        self, found: Sequence[Candidate], least_possible: int
    ) -> list[Candidate]:
        """Return candidates with offloads that improve a frontier: some are cheaper, some have lower peaks.

        Args:
            found: the candidates of the frontier, without offloads, lowest peak first.
            least_possible: lower bound on the peak of every schedule, in bytes.
        """
        thin = found[:: max(1, len(found) // _OFFLOADED)]
        wanted: list[tuple[int, Candidate | None]] = [(d.peak_bytes, d) for d in thin]
        lowest = found[0].peak_bytes
        room = lowest - least_possible
        wanted += [(lowest - room * k // _BELOW, None) for k in range(1, _BELOW)]
        made = []
        for peak, without in wanted:
            d = self.with_offloads(peak, without)
            if d is not None and d is not without:
                made.append(self.simulated(d))
            elif without is None:
                break
        return made

    def within_peak(self, budget: Budget, *, offload: bool = True) -> Candidate:
        """Return the cheapest decision found whose simulated peak is within a budget.

        Args:
            budget: a budget on the peak, in bytes or as a ratio.
            offload: whether untagged values may be offloaded. Tagged values are offloaded in any case.

        Raises:
            BudgetError: no decision was found within the budget; the message names the least peak that was
                found.
        """
        started = time.perf_counter()
        peak_bytes = self._peak_of(budget)
        if offload and self.may_offload:
            found = self._offloaded_within(budget, peak_bytes)
        else:
            found = self.with_tagged(self._within(budget, peak_bytes))
        own = self.state.get(RegionBudget())
        took = time.perf_counter() - started
        choice = replace(found.choice, elapsed_s=took, region_budget=own)
        if budget.peak_bytes is None:
            choice = replace(choice, peak_limit=peak_bytes)
        return replace(found, choice=choice)

    def _offloaded_within(self, budget: Budget, peak_bytes: int) -> Candidate:
        """Return the cheapest decision found within a peak, with or without offloads.

        Arguments and errors are those of `_within`.
        """
        try:
            without = self._within(budget, peak_bytes)
        except BudgetError:
            # Offloading cannot go below this bound.
            possible = peak_bytes >= self.search.least_possible
            found = self.with_offloads(peak_bytes, None) if possible else None
            if found is None:
                raise
        else:
            found = self.with_offloads(peak_bytes, without) or without
        found = self.with_tagged(found)
        tried = self.search.tried(found.saved)
        bound = self.bound_with_offloads(peak_bytes, self.search.highest(tried))
        return replace(found, choice=replace(found.choice, recompute_bound=bound))

    def limit_of(self, budget: Budget) -> Budget:
        """Convert a budget that is a ratio of the peak to bytes; return any other budget unchanged."""
        return budget if budget.peak_share is None else Budget(peak_bytes=self._peak_of(budget))

    def _peak_of(self, budget: Budget) -> int:
        """Convert a budget on the peak to bytes.

        Ratio 0 stands for the least peak found, and ratio 1 for the peak of the plan for budget 1. If `ends` is set,
        the request's own budget refers to these two peaks instead.
        """
        if budget.peak_bytes is not None:
            return budget.peak_bytes
        ends = self.ends if budget == self.request.budget else None
        least, most = ends or (self.least_found, self.peak(self.allowed_full))
        return least + bytes_of_share(budget.peak_share or 0.0, most - least)

    @property
    def is_alone(self) -> bool:
        """Whether the user named a solver other than ``auto``, so that only this solver decides."""
        return not is_auto(self.request.solver)

    @cached_property
    def most_saved(self) -> int | None:
        """Bytes that the user's code allows the graph to save; None if the code sets no limit.

        The code sets this limit by ``region_activation_memory_budget``, as a ratio of the bytes that the
        runtime-optimal partition saves.
        """
        own = self.state.get(RegionBudget())
        if own is None:
            return None
        return Budget(share=own).capacity(full=self.full_bytes, least=self.least_bytes)

    def allowed_vertices(self, most: int) -> list[int]:
        """Return the saved bytes of about ``most`` vertices of the hull, without those above `most_saved`."""
        limit = self.most_saved
        return [n for n, _ in self.cuts(most) if limit is None or n <= limit]

    def may_save(self, decided: Candidate) -> bool:
        """Return whether a candidate saves at most `most_saved` bytes."""
        return self.most_saved is None or decided.saved_bytes <= self.most_saved

    @property
    def allowed_full(self) -> Candidate:
        """The decision at budget 1; if `most_saved` is a lower limit on the saved bytes, the decision at that limit."""
        most = self.most_saved
        return self.full if most is None else self.at(min(most, self.full_bytes))

    @property
    def allowed_cheapest(self) -> Candidate:
        """The decision with the least recompute cost, among those that save at most `most_saved` bytes."""
        return self.cheapest if self.most_saved is None else self.allowed_full

    def _within(self, budget: Budget, peak_bytes: int) -> Candidate:
        """Return the cheapest decision found within a peak, without offloads.

        Args:
            budget: the requested budget. If it is a ratio, decisions at the least peak compete, too, so that a higher
                ratio does not cost more than ratio 0.
            peak_bytes: the peak in bytes that the budget stands for.

        Raises:
            BudgetError: no decision was found within the peak.
        """
        if self.peak(self.allowed_cheapest) <= peak_bytes:
            return self.allowed_cheapest
        asked = f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes)"
        # Hooks may pack saved values into fewer bytes, so the bound on the peak does not hold with hooks.
        possible = 0 if self.request.hooks else self.search.least_possible
        if peak_bytes < possible:
            raise self._none_within(asked, possible, infeasible=True)
        self.on_step(f"searching within a peak of {format_bytes(peak_bytes)}")
        known = self._proposed(budget, peak_bytes)
        if not known:
            raise self._none_within(asked, possible)
        best = min(known, key=lambda d: (d.cost, self.peak(d), d.saved_bytes))
        return self._bounded(best, peak_bytes)

    def _proposed(self, budget: Budget, peak_bytes: int) -> list[Candidate]:
        """Return candidates within a peak, from several searches. Arguments as in `_within`."""

        def fits(*found: Candidate | None) -> list[Candidate]:
            return [d for d in found if d is not None and self.peak(d) <= peak_bytes]

        if self.is_alone:
            return fits(self.swept(peak_bytes), self.scheduled(peak_bytes, self.search))
        known = fits(self.searched(peak_bytes), self.allowed_full)
        if budget.peak_share is not None:
            known += fits(self.least_peak)
        if self.request.hooks or not known:
            # Hooks pack saved values, so the peaks of the search differ from those of the step.
            known += fits(self.least_peak, self.swept(peak_bytes))
            if known:
                cheapest = min(known, key=lambda d: (d.cost, d.saved_bytes))
                known += fits(self.searched(peak_bytes, cheapest))
            if not self.request.hooks:
                parts = _LOWER_LIMITS if len(self.state.index) <= LEAST_RUNS else _LOWER_LIMITS[:1]
                aims = [int(part * peak_bytes) for part in parts]
                known += fits(*(self.searched(a) for a in aims if a >= self.search.least_possible))
            return known
        least = self.least_found if budget.peak_share is not None else peak_bytes
        if least < peak_bytes:
            lowest = self.search.tried(self.least_peak.saved)
            bound = self.bounds.bound(least, self.search.highest(lowest))
            if bound <= min(d.cost for d in known):
                # The search that ratio 0 makes, which may be cheaper.
                known += fits(self.searched(least))
        best = min(known, key=lambda d: d.cost)
        if best.cost and self.peak(best) < _SLACK * peak_bytes:
            # On some large graphs, the search ends far below the limit, and a decision of the solver is cheaper.
            below, above = _around(self._ends(), peak_bytes)
            low = below[0] if below else self.least_bytes
            high = above[0] if above and above[0] > low else self.full_bytes
            known += fits(*self.bisected(low, high, peak_bytes, CLOSING, self.peak))
        return known

    def _ends(self) -> list[tuple[int, int]]:
        """Return about `VERTICES` vertices of the hull, each as its saved bytes and its schedule's peak in bytes."""
        cuts = self.cuts(VERTICES)
        return [(nbytes, self.search.tried(saved).peak_bytes) for nbytes, saved in cuts]

    def bisected(
        self, low: int, high: int, peak_bytes: int, most: int, peak: Callable[[Candidate], int]
    ) -> Iterator[Candidate]:
        """Yield the solver's decisions at limits on saved bytes, which are bisected towards a peak.

        Args:
            low: the lowest limit.
            high: the highest limit.
            peak_bytes: limit on the peak, in bytes. After a decision within this peak, the next limit on saved bytes
                is higher; after any other decision, it is lower.
            most: maximum number of decisions.
            peak: function that returns the peak of a decision in bytes: `peak` or `expected`.
        """
        for _ in range(most):
            if high - low <= low // 1000:
                return
            middle = (low + high) // 2
            decided = self.at(middle)
            yield decided
            low, high = (middle, high) if peak(decided) <= peak_bytes else (low, middle)

    def scheduled(self, peak_bytes: int, search: PeakSearch) -> Candidate | None:
        """Ask the user's solver for a schedule within a peak of a search's step problem; return it as a candidate.

        Args:
            peak_bytes: limit on the peak in that step problem, in bytes.
            search: the search whose step problem the solver gets.

        Returns:
            The candidate, whose peak may exceed the limit. None if the solver does not solve step problems, finds no
            schedule, or its schedule saves more than `most_saved` bytes.
        """
        solver = self.request.solver
        if "schedule" not in solver.solves or self.request.hooks:
            return None
        self.on_step(f"asking '{solver.name}' for a schedule")
        start, _, _ = search.schedule(self.least_peak.saved)
        found = search.orders.solved(solver, start, peak_bytes, self.request.time_limit)
        return self.informed(found) if found and self.may_save(found) else None

    def _none_within(self, asked: str, possible: int, *, infeasible: bool = False) -> BudgetError:
        """Return the error for a limit on the peak within which no plan was found.

        Args:
            asked: the budget, as text.
            possible: lower bound on the peak of every schedule, in bytes; 0 if none is known.
            infeasible: whether the limit is below ``possible``.
        """
        least = self.least_found
        alive = f"{possible} bytes ({format_bytes(possible)})"
        if infeasible:
            why = (
                f", which is infeasible: every schedule of this step has a peak of at least {alive}"
            )
        else:
            whose = f" by '{self.request.solver.name}'" if self.is_alone else ""
            proven = (
                f"; it is proven only that no schedule has less than {alive}" if possible else ""
            )
            why = f", and no plan was found within it{whose}{proven}"
        held = ""
        if self.state.policies or (self.state.plain is not None and not self.state.chunk):
            named = self.state.policies or "by remat.region"
            held = f". All plans follow the policies {named}; others may lower the least peak"
        return BudgetError(
            f"{asked}{why}. The least peak of any plan found is {format_bytes(least)} ({least} bytes); "
            f"{self.request.how_to_run(least)}. {_UNSHRUNK}{held}{learned_text(self.state.index.nodes)}"
        )

    @cached_property
    def least_found(self) -> int:
        """The least peak found, in bytes: of `least_peak`, the decision at budget 1, and the cheapest decision."""
        return min(map(self.peak, (self.least_peak, self.allowed_cheapest, self.allowed_full)))

    @cached_property
    def least_peak(self) -> Candidate:
        """The decision with the least peak that was found.

        With the solver ``auto``, remat searches for this decision. If the user named another solver, this is its
        decision with the least peak, of those at several limits on saved bytes.
        """
        if self.is_alone:
            own = [self.allowed_full, *map(self.at, self.capacities(self.most_saved))]
            return min(own, key=lambda d: (self.peak(d), d.cost))
        search, cuts = self.search, self.cuts(4 * VERTICES)
        starts = [*(saved for _, saved in cuts), *self._starts(0)]
        if self.request.hooks:
            # The search counts the bytes of values before packing, so its lowest peak may not be the lowest one with
            # hooks. Therefore, decisions at several limits on saved bytes compete, too.
            found = [search.within(0, starts, self.most_saved)]
            decided = [*map(self.at, self.capacities(self.most_saved))]
        else:
            found, decided = search.lowest(starts, self.most_saved), []
        decided += [self.allowed_full, *map(self.informed, found)]
        return min(filter(self.may_save, decided), key=self.peak)

    def searched(
        self, peak_bytes: int, *starts: Candidate, capacity: int | None = None
    ) -> Candidate | None:
        """Search for a decision whose peak is within a limit: first by prices of memory, then by other node orders.

        A price (Lagrange multiplier) makes memory at one program point cost something.

        Args:
            peak_bytes: limit on the peak, in bytes.
            starts: decisions to start from, in addition to those of `_starts`.
            capacity: most bytes that the decision may save; None: no such limit.

        Returns:
            The cheapest decision found within the limits; None if none was found.
        """
        limits = [c for c in (capacity, self.most_saved) if c is not None]
        capacity = min(limits, default=None)
        tried = self._by_prices(peak_bytes, starts, capacity)
        found = [self.informed(tried)]
        if not self.request.hooks:
            found += map(self.informed, self.search.reordered(tried, peak_bytes))
        most = math.inf if capacity is None else capacity
        cheapest = sorted((d for d in found if d.saved_bytes <= most), key=lambda d: d.cost)
        best = next((d for d in cheapest if self.peak(d) <= peak_bytes), None)
        return None if best is None else self._bounded(best, peak_bytes)

    def _by_prices(
        self, peak_bytes: int, starts: Iterable[Candidate], capacity: int | None
    ) -> Candidate:
        """Search by prices from ``starts`` and `_starts`; arguments otherwise as in `PeakSearch.within`."""
        saved = [*(s.saved for s in starts), *self._starts(peak_bytes)]
        return self.search.within(peak_bytes, saved, capacity)

    def _bounded(self, decided: Candidate, peak_bytes: int) -> Candidate:
        """Return a copy of ``decided`` with a lower bound in its ``choice``.

        No decision whose peak is at most ``peak_bytes`` costs less than the bound. With hooks on saved tensors, the
        bound is 0, because hooks may change the bytes of saved values.
        """
        # The bound that `decided` has may hold for a limit on saved bytes, so it does not hold for a peak.
        bound = 0
        if not self.request.hooks:
            tried = self.search.tried(decided.saved)
            bound = self.bounds.bound(peak_bytes, self.search.highest(tried))
        return replace(decided, choice=replace(decided.choice, recompute_bound=bound))

    def _starts(self, peak_bytes: int) -> list[tuple[int, ...]]:
        """Return the decisions from which each search within a peak starts, each as its saved nodes."""
        found = (self.allowed_cheapest, self.allowed_full, self.runtime_optimal)
        cuts = (saved for _, saved in self.cuts(VERTICES))
        return [*(d.saved for d in found), *self._closing_in(peak_bytes), *cuts]

    def _near(self, capacity: int) -> tuple[int, ...]:
        """Return the saved nodes of a good decision within ``capacity`` saved bytes, without a proof of optimality."""
        # The decision is only a start of a search.
        return run(Lagrangian(work=0), self.lowered.problem.within(capacity)).saved

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
        tried, ends = self.search.tried, self._ends()
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

    def swept(self, peak_bytes: int) -> Candidate | None:
        """Decide at several limits on saved bytes; return the cheapest decision whose peak is within ``peak_bytes``.

        None if no such decision is within the peak.
        """
        capacities = self.capacities(self.most_saved)
        first = self.allowed_full if self.is_alone else self.runtime_optimal
        fits = [first] if self.may_save(first) and self.peak(first) <= peak_bytes else []
        for c in reversed(capacities):
            # Limits fall in this loop, and the lower bound on the cost rises. Once the bound reaches the least cost so
            # far, no further limit gives a cheaper decision.
            if fits and self.hull.edge(c).bound(c) >= min(d.cost for d in fits):
                break
            found = self.at(c)
            if self.peak(found) <= peak_bytes:
                fits.append(found)
        if not fits:
            return None
        # A limit between the best one and the next higher one may give a better decision.
        low = min(fits, key=lambda d: (d.cost, d.saved_bytes)).saved_bytes
        high = min((c for c in capacities if c > low), default=low)
        between = self.bisected(low, high, peak_bytes, 6, self.peak)
        fits += [d for d in between if self.peak(d) <= peak_bytes]
        return min(fits, key=lambda d: (d.cost, d.saved_bytes))


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
