"""Decisions by the peak of the step: within a peak, no higher than budget 1's, and over all peaks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations

from remat.errors import BudgetError
from remat.graph.fused_liveness import predict_peak
from remat.graph.lowering import Decision
from remat.passes.decide.budgeted import RegionBudget
from remat.planning.decider import VERTICES, Decided, Decider
from remat.planning.offload_planner import OffloadPlanner
from remat.planning.order_search import Reordered
from remat.planning.peak_bound import PeakBounds
from remat.planning.peak_frontier import FEW_RUNS, PeakFrontier, pareto
from remat.planning.peak_search import PeakSearch, Tried
from remat.solvers.auto import is_auto
from remat.solvers.graph_problem import evaluate
from remat.solvers.lagrangian import Lagrangian
from remat.solvers.run import run
from remat.units import (
    Budget,
    bytes_of_share,
    format_bytes,
)

#: Vertices of the hull that a frontier by peak begins with, at most.
MOST_CUTS = 40
#: Nodes of all its plans together up to which those are split, for their simulated peaks.
SIMULATED = 400_000
#: Runs of a step up to which its frontier ends at the least peak that a plan for that is searched for: beyond
#: them that search takes several times as long as all of the frontier.
LEAST_RUNS = 2_000
#: Byte budgets that are tried in search of one whose peak is the wanted one.
CLOSING = 3
#: Parts of the room between the least peak and the lowest that decisions alone reach: orders are searched between them.
_TO_LEAST = 6
#: Peaks of a frontier at which offloading is tried, nearly; and parts of the room below the lowest, likewise.
_OFFLOADED, _BELOW = 12, 4
#: Why no budget lowers a peak further, and what does.
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget: raise it, or make the "
    "model or the batch smaller"
)


class PeakPlanner:
    """Decides one prepared graph by the peaks of its steps.

    Args:
        decider: decides it within bytes.
    """

    def __init__(self, decider: Decider) -> None:
        self._of = decider
        self._expected: dict[Decision, int] = {}

    def running(self, decided: Decided) -> int:
        """The peak as the step will run: simulated, or expected of what Inductor compiles."""
        if self._of.state.joint.lower == "eager":
            return self._of.peak(decided)
        known = self._expected.get(decided.decision)
        if known is None:
            done = self._of.split_of(decided)
            assert done.forward is not None
            assert done.backward is not None
            joint = done.joint
            peak = predict_peak(done.forward, done.backward, joint.num_fwd_outputs, joint.memories)
            known = self._expected[decided.decision] = peak.nbytes
        return known

    def frontier(self) -> tuple[list[tuple[Decided, int]], tuple[tuple[int, int], ...]]:
        """Decisions that no other beats, each with its peak, the lowest first; and a line below which none lies.

        Peaks are simulated; of many decisions on a large graph they are those of their schedules, which may
        differ by what a few scalars take. Of a step of up to `LEAST_RUNS` runs the first is within the least peak
        that `within` comes to. Where values may be offloaded, that is tried at some of the peaks, and
        below the lowest. The line is given by its vertices (peak bytes, cost).
        """
        offloading = None if self._of.request.offload is None else self.offloading
        search = PeakFrontier(self._of.state, self._of.lowered, self._of.request.cost)
        cuts = [saved for _, saved in self._of.cuts(MOST_CUTS)]
        if self.is_alone:
            own = [
                (d, self._of.peak(d)) for d in (self.full, *map(self._of.at, self._capacities()))
            ]
            line = search.bound(self.bounds, cuts)
            return self._above(line, self._with_tagged(own)), line
        others = map(self._of.saved_of, (self._of.full, self._of.runtime_optimal))
        found = search.found([*cuts, *others], self._of.on_step)
        self._of.on_step("proving bounds")
        line = search.bound(offloading or self.bounds, cuts)
        few = len(found) * len(self._of.state.index) <= SIMULATED
        decided = [(self.decided(f), f.peak_bytes) for f in found]
        decided = [(d, self._of.peak(d) if few else at) for d, at in decided]
        if len(search.step.problem.runnable) <= LEAST_RUNS:
            lowest = self._within(Budget(peak_share=0.0), self.least_found)
            least = self._of.peak(lowest)
            first = next((f for f in found if isinstance(f, Tried)), None)
            room = found[0].peak_bytes - least
            if first and room > 0 and len(search.step.problem.runnable) <= FEW_RUNS:
                self._of.on_step("searching orders down to the least peak")
                aims = (least + room * k // _TO_LEAST for k in range(1, _TO_LEAST))
                orders = (search.reordered(first, aim) for aim in aims)
                decided += [(d, self._of.peak(d)) for d in map(self.decided, filter(None, orders))]
            decided = _on_curve([*decided, (lowest, least)])
        if offloading is not None:
            decided += self._with_offloads(offloading, decided, search.least_possible)
        return self._above(line, self._with_tagged(decided)), line

    def _with_tagged(self, decided: list[tuple[Decided, int]]) -> list[tuple[Decided, int]]:
        """Decisions with what is tagged for the host's memory offloaded, each with its peak."""
        if self._of.request.offload is None:
            return decided
        found = ((self.offloading.with_tagged(d, at), d, at) for d, at in decided)
        return [(new, at if new is d else self._of.peak(new)) for new, d, at in found]

    @staticmethod
    def _above(
        line: tuple[tuple[int, int], ...], decided: Sequence[tuple[Decided, int]]
    ) -> list[tuple[Decided, int]]:
        """The decisions that no other beats, the lowest peak first, each with the bound at its peak."""
        pairs = []
        for d, at in decided:
            bound = next((cost for peak, cost in line if peak >= at), 0)
            pairs.append((replace(d, choice=replace(d.choice, recompute_bound=bound)), at))
        return _on_curve(pairs)

    def _with_offloads(
        self, offloading: OffloadPlanner, found: Sequence[tuple[Decided, int]], least_possible: int
    ) -> list[tuple[Decided, int]]:
        """Cheaper decisions with offloads than some of a frontier, and such of lower peaks, each with its peak."""
        thin = found[:: max(1, len(found) // _OFFLOADED)]
        wanted: list[tuple[int, Decided | None]] = [(peak, d) for d, peak in thin]
        lowest = found[0][1]
        room = lowest - least_possible
        wanted += [(lowest - room * k // _BELOW, None) for k in range(1, _BELOW)]
        made = []
        for peak, without in wanted:
            d = offloading.within(peak, without)
            if d is not None and d is not without:
                made.append((d, self._of.peak(d)))
            elif without is None:
                break
        return made

    @cached_property
    def search(self) -> PeakSearch:
        return PeakSearch(self._of.state, self._of.lowered, self._of.request.cost)

    @cached_property
    def bounds(self) -> PeakBounds:
        return PeakBounds(self._of.state, self._of.lowered.problem)

    def within(self, budget: Budget, *, offload: bool = True) -> Decided:
        """The cheapest decision found whose simulated peak is within a budget on it.

        Args:
            budget: a peak, or a share.
            offload: whether values may be offloaded, if the request has a link.

        Raises:
            BudgetError: none is; the message names the least peak that was found, or is possible.
        """
        started = time.perf_counter()
        peak_bytes = self._peak_of(budget)
        if offload and self._of.request.offload is not None:
            found = self._offloaded_within(budget, peak_bytes)
        else:
            found = self._within(budget, peak_bytes)
        own = self._of.state.get(RegionBudget())
        took = time.perf_counter() - started
        choice = replace(found.choice, elapsed_s=took, region_budget=own)
        if budget.peak_bytes is None:
            choice = replace(choice, peak_limit=peak_bytes)
        return replace(found, choice=choice)

    def _offloaded_within(self, budget: Budget, peak_bytes: int) -> Decided:
        """The same where values may be offloaded."""
        try:
            without = self._within(budget, peak_bytes)
        except BudgetError:
            possible = peak_bytes >= self.search.least_possible  # whatever is offloaded
            found = self.offloading.within(peak_bytes, None) if possible else None
            if found is None:
                raise
        else:
            found = self.offloading.within(peak_bytes, without) or without
        found = self.offloading.with_tagged(found, peak_bytes)
        tried = self.search.tried(self._of.saved_of(found))
        bound = self.offloading.bound(peak_bytes, self.search.highest(tried))
        return replace(found, choice=replace(found.choice, recompute_bound=bound))

    @cached_property
    def offloading(self) -> OffloadPlanner:
        """Decides which values are offloaded, where the request has a link."""
        return OffloadPlanner(self._of, self.search, self.bounds)

    def limit_of(self, budget: Budget) -> Budget:
        """A budget with a ratio of the peak in bytes; any other budget as it is."""
        return budget if budget.peak_share is None else Budget(peak_bytes=self._peak_of(budget))

    def _peak_of(self, budget: Budget) -> int:
        """A budget on the peak in bytes."""
        if budget.peak_bytes is not None:
            return budget.peak_bytes
        least, most = self.least_found, self._of.peak(self.full)
        return least + bytes_of_share(budget.peak_share or 0.0, most - least)

    @property
    def is_alone(self) -> bool:
        """Whether a solver was named: it decides alone, and no search of ours takes part."""
        return not is_auto(self._of.request.solver)

    @cached_property
    def most_saved(self) -> int | None:
        """Bytes that the code allows its region to save; None if it sets no budget."""
        own = self._of.state.get(RegionBudget())
        if own is None:
            return None
        return Budget(share=own).capacity(full=self._of.full_bytes, least=self._of.least_bytes)

    def _may_save(self, decided: Decided) -> bool:
        """Whether the budget that the code sets for its region allows a decision."""
        return self.most_saved is None or decided.saved_bytes <= self.most_saved

    @property
    def full(self) -> Decided:
        """The decision under budget 1, and under the budget that the code sets for its region."""
        most = self.most_saved
        return self._of.full if most is None else self._of.at(min(most, self._of.full_bytes))

    @property
    def _cheapest(self) -> Decided:
        """The decision that recomputes least of those that the code's region budget allows."""
        return self._of.cheapest if self.most_saved is None else self.full

    def _capacities(self) -> list[int]:
        """Numbers of saved bytes that are looked at, within what the code allows its region."""
        most = math.inf if self.most_saved is None else self.most_saved
        return sorted({c for c in self._of.capacities() if c <= most})

    def _within(self, budget: Budget, peak_bytes: int) -> Decided:
        """The same with every saved value just kept."""
        if self._of.peak(self._cheapest) <= peak_bytes:
            return self._cheapest
        asked = f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes)"
        possible = 0 if self._of.request.hooks else self.search.least_possible
        if peak_bytes < possible:
            raise self._none_within(asked, possible, infeasible=True)
        self._of.on_step(f"searching within a peak of {format_bytes(peak_bytes)}")
        if self.is_alone:
            alone = self.swept(peak_bytes)
            if alone is None:
                raise self._none_within(asked, possible)
            return self._bounded(alone, peak_bytes)
        found = self.searched(peak_bytes)
        others = (self.full, *((self.least_peak,) if budget.peak_bytes is None else ()))
        known: list[Decided] = [d for d in (found, *others) if d and self._of.peak(d) <= peak_bytes]
        if known and not self._of.request.hooks:
            best = min(known, key=lambda d: d.cost)
            if budget.peak_share is not None and self._may_cost(best.cost, self.least_found):
                cheaper = self.searched(self.least_found)  # what a share of 0 comes to
                known += [cheaper] if cheaper else []
            best = min(known, key=lambda d: (d.cost, self._of.peak(d), d.saved_bytes))
            return self._bounded(best, peak_bytes)
        # What the search takes the peak to be is not what it is where hooks pack what is saved.
        swept = self.swept(peak_bytes)
        fits = [d for d in (*known, self.least_peak, swept) if d and self._of.peak(d) <= peak_bytes]
        if not fits:
            raise self._none_within(asked, possible)
        best = min(fits, key=lambda d: (d.cost, d.saved_bytes))
        better = self.searched(peak_bytes, best)
        if better is not None and better.cost < best.cost:
            return better
        return self._bounded(best, peak_bytes)

    def _none_within(self, asked: str, possible: int, *, infeasible: bool = False) -> BudgetError:
        """The error of a peak without a plan: the proven bound, the least peak found, and the budget to give."""
        least = self.least_found
        alive = f"{possible} bytes ({format_bytes(possible)})"
        if infeasible:
            why = f", which is infeasible: every schedule of this step has {alive} alive at some moment"
        else:
            whose = f" by '{self._of.request.solver.name}'" if self.is_alone else ""
            proven = (
                f"; it is proven only that no schedule has less than {alive}" if possible else ""
            )
            why = f", and no plan was found within it{whose}{proven}"
        return BudgetError(
            f"{asked}{why}. The least peak of any plan found is {format_bytes(least)} ({least} bytes); to run that "
            f"plan, give budget={least}. {_UNSHRUNK}"
        )

    def _may_cost(self, cost: int, peak_bytes: int) -> bool:
        """Whether it is not proven that every plan within a peak costs more than that."""
        best = self.search.tried(self._of.saved_of(self.least_peak))
        return self.bounds.bound(peak_bytes, self.search.highest(best)) <= cost

    @cached_property
    def least_found(self) -> int:
        """The least peak of all decisions that are looked at whatever the budget, in bytes."""
        return min(map(self._of.peak, (self.least_peak, self._cheapest, self.full)))

    @cached_property
    def least_peak(self) -> Decided:
        """The decision of the least peak that a search for less than is possible comes to."""
        if self.is_alone:
            own = [self.full, *map(self._of.at, self._capacities())]
            return min(own, key=lambda d: (self._of.peak(d), d.cost))
        search, cuts = self.search, self._of.cuts(4 * VERTICES)
        peaks = [search.tried(saved).peak_bytes for _, saved in cuts]
        lowest = peaks.index(min(peaks))
        around = [nbytes for nbytes, _ in cuts[max(0, lowest - 1) : lowest + 2]]
        between = [self._near((a + b) // 2) for a, b in combinations(around, 2)]
        starts = [*(saved for _, saved in cuts), *between]
        found = search.within(0, [*starts, *self._starts(0)], self.most_saved)
        decided = [self.full, self.decided(found)]
        if self._of.request.hooks:
            decided += map(self._of.at, self._capacities())
        else:
            lower = search.lowest(found)
            decided += [self.decided(lower)] if lower else []
        return min(filter(self._may_save, decided), key=self._of.peak)

    def searched(
        self, peak_bytes: int, *starts: Decided, capacity: int | None = None
    ) -> Decided | None:
        """What prices on moments come to, or a search over orders from there; None where neither fits.

        Args:
            peak_bytes: the peak.
            starts: decisions to begin with, beside those of every search.
            capacity: bytes that it may save; None: any number.
        """
        limits = [c for c in (capacity, self.most_saved) if c is not None]
        capacity = min(limits, default=None)
        saved = [*map(self._of.saved_of, starts), *self._starts(peak_bytes)]
        tried = self.search.within(peak_bytes, saved, capacity)
        found = [self.decided(tried)]
        if not self._of.request.hooks:
            other = self.search.reordered(tried, peak_bytes)
            found += [self.decided(other)] if other else []
        most = math.inf if capacity is None else capacity
        cheapest = sorted((d for d in found if d.saved_bytes <= most), key=lambda d: d.cost)
        best = next((d for d in cheapest if self._of.peak(d) <= peak_bytes), None)
        return None if best is None else self._bounded(best, peak_bytes, tried)

    def _bounded(self, decided: Decided, peak_bytes: int, tried: Tried | None = None) -> Decided:
        """A decision with what is proven of all within a peak; ``tried`` says at which moments to look."""
        bound = 0  # what is proven within bytes is not proven within a peak
        if not self._of.request.hooks:  # which may pack what is saved
            tried = tried or self.search.tried(self._of.saved_of(decided))
            bound = self.bounds.bound(peak_bytes, self.search.highest(tried))
        return replace(decided, choice=replace(decided.choice, recompute_bound=bound))

    def _starts(self, peak_bytes: int) -> list[tuple[int, ...]]:
        """Decisions that a search for a peak begins with."""
        found = (self._cheapest, self.full, self._of.runtime_optimal)
        cuts = (saved for _, saved in self._of.cuts(VERTICES))
        return [*map(self._of.saved_of, found), *self._closing_in(peak_bytes), *cuts]

    def _near(self, capacity: int) -> tuple[int, ...]:
        """What a decision within bytes saves, near the best; a search need not start from a proven one."""
        problem = self._of.lowered.problem
        return run(Lagrangian(work=0), problem.within(capacity)).saved

    def _closing_in(self, peak_bytes: int) -> Iterator[tuple[int, ...]]:
        """Decisions at byte budgets closer and closer to the largest whose peak is within one.

        Between the vertices of the hull around it, by the rule of false position, bisecting every other
        time.
        """
        tried = self.search.tried
        ends = [(nbytes, tried(saved).peak_bytes) for nbytes, saved in self._of.cuts(VERTICES)]
        inside = [i for i, (_, peak) in enumerate(ends) if peak <= peak_bytes]
        if not inside or inside[-1] + 1 == len(ends):
            return
        low, high = ends[inside[-1]], ends[inside[-1] + 1]
        for turn in range(CLOSING):
            if high[0] - low[0] <= max(1, low[0] // 500):
                return
            share = (peak_bytes - low[1]) / max(1, high[1] - low[1]) if turn % 2 == 0 else 0.5
            capacity = low[0] + int(min(max(share, 0.05), 0.95) * (high[0] - low[0]))
            saved = self._near(capacity)
            yield saved
            peak = tried(saved).peak_bytes
            low, high = ((capacity, peak), high) if peak <= peak_bytes else (low, (capacity, peak))

    def decided(self, found: Tried | Reordered) -> Decided:
        """What a search for a peak has found, as a decision."""
        lowered = self._of.lowered
        if isinstance(found, Tried):
            decision = lowered.decision(found.saved)
            saved_bytes = evaluate(lowered.problem, found.saved).saved_bytes
        else:
            decision = found.decision
            saved_bytes = sum(lowered.problem.size[i] for i in lowered.saved_of(decision))
        asked = [
            d.choice for d in self._of.decisions.values()
        ]  # the search began with what they came to
        choice = replace(
            self._of.choice(max(self._of.full_bytes, saved_bytes)),
            solver=self._of.deciding.asked().name,
            items=len(lowered.problem),
            elapsed_s=sum(c.elapsed_s for c in asked),
            deterministic=all(c.deterministic for c in asked),
        )
        return Decided(decision=decision, saved_bytes=saved_bytes, cost=found.cost, choice=choice)

    def swept(self, peak_bytes: int) -> Decided | None:
        """The cheapest decision of a sweep over byte budgets that is within a peak; None if none is."""
        capacities = self._capacities()
        first = self.full if self.is_alone else self._of.runtime_optimal
        fits = [first] if self._may_save(first) and self._of.peak(first) <= peak_bytes else []
        for c in reversed(capacities):  # costs rise: what follows cannot beat what costs less
            if fits and self._of.hull.edge(c).bound(c) >= min(d.cost for d in fits):
                break
            found = self._of.at(c)
            if self._of.peak(found) <= peak_bytes:
                fits.append(found)
        if not fits:
            return None
        best = min(fits, key=lambda d: (d.cost, d.saved_bytes))
        # Between the best that fits and the next budget that was tried there may be better.
        low = best.saved_bytes
        high = min((c for c in capacities if c > low), default=low)
        for _ in range(6):
            if high - low <= low // 1000:
                break
            middle = (low + high) // 2
            found = self._of.at(middle)
            if self._of.peak(found) <= peak_bytes:
                best = min(best, found, key=lambda d: (d.cost, d.saved_bytes))
                low = middle
            else:
                high = middle
        return best


def _on_curve(found: list[tuple[Decided, int]]) -> list[tuple[Decided, int]]:
    """Decisions, each with its peak, that no other beats: the lowest first."""
    return pareto(found, lambda pair: (pair[1], pair[0].cost))
