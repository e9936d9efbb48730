"""Choose a candidate to compile, from the estimated peaks of all candidates and the compiled peaks of some.

A candidate has up to three peaks. The *simulated* peak is that of the unfused graphs. The *estimated* peak is computed
from the unfused graphs for the fused code (`remat.graph.memory.fused_liveness`). The *compiled* peak is that of the
code that Inductor made; it replaces the estimated peak once a candidate was compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from remat.errors import BudgetError
from remat.graph.joint import primals_of
from remat.graph.memory.storages import Sizes
from remat.graph.problems.lowering import Decision
from remat.planning.reading.plan_text import learned_text
from remat.planning.search.aim import aim
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT, ESTIMATED
from remat.planning.search.pool import CandidatePool, Limits, cost_of
from remat.planning.search.search import Search
from remat.units import Budget, bytes_of_share, format_bytes


@dataclass(slots=True)
class CompiledRound:
    """The compilations of one step under one budget so far; the step exceeded the budget in each.

    Attributes:
        peaks: compiled peak in bytes of each decision that was compiled.
        limit: bytes that the budget allowed the last compiled step.
        excess: bytes by which the next plan must be below the budget; see `remat.integrations.compiled_budget`.
        times: how often the step was planned again because a compiled step exceeded the budget.
        search: the search that found the last plan, with its pool of candidates. None if no plan was searched.
    """

    peaks: dict[Decision, int] = field(default_factory=dict)
    limit: int = 0
    excess: int = 0
    times: int = 0
    search: CompiledSearch | None = None

    def is_last(self, budget: Budget) -> bool:
        """Return whether remat allows only one more compilation of the step under a budget."""
        effort = DEFAULT.compiling
        return self.times >= (effort.replans if budget.peak_share is None else effort.of_ratio)


class CompiledSearch:
    """Search for candidates of one graph under a budget on the peak of the code that Inductor compiles.

    Args:
        search: the search for candidates; its pool contains all candidates.
        most: least number of bytes that the peak ratio 1 stands for: the estimated peak of the step without chunks.
        before: the search on an earlier trace of the step, because each compilation traces the step anew. If the graphs
            and options of both traces are equal, the candidates of the earlier search are kept.

    Attributes:
        search: the search for candidates.
        limit: the peak in bytes that the budget's ratio stands for; None until this peak is computed.
    """

    def __init__(self, search: Search, most: int = 0, before: CompiledSearch | None = None) -> None:
        self.search, self._context = search, search.context
        self._estimated, self._most = search.measures.estimated, most
        # Each compilation traces the step anew, and its candidates name nodes of their own trace.
        keeps = before is not None and search.adopt(before.search)
        self.limit: int | None = before.limit if before is not None and keeps else None

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the step's parameters, buffers and inputs, which are alive throughout the step."""
        joint = self._context.state.joint
        return sum(Sizes(joint.memories).of_all(primals_of(joint)).values())

    def search_within(self, budget: Budget, past: CompiledRound | None = None) -> Candidate:
        """Search for decisions, and return the cheapest one whose peak is within a budget.

        The peak of a decision is its compiled peak if the decision was compiled, and its estimated peak if not. Since
        an estimate may be wrong, the caller compiles the decision, and calls this method again with the compiled peak
        in ``past``. `_best` defines which candidate is chosen.

        Args:
            budget: a budget on the peak, in bytes or as a ratio.
            past: the compilations so far; None: nothing was compiled yet.

        Returns:
            The chosen candidate, without a lower bound on its cost. If the budget is a ratio, the attribute `limit` is
            set to the peak in bytes that the ratio stands for.

        Raises:
            BudgetError: the budget is in bytes, and parameters and inputs alone exceed it.
        """
        self._refuse_less_than_inputs(budget)
        past, context = past or CompiledRound(), self._context
        peaks, last = past.peaks, past.is_last(budget)
        in_bytes, offloads = budget.peak_bytes is not None, context.request.offload is not None
        limit = budget.peak_bytes if in_bytes else self.limit
        # The last decision under a budget in bytes is the one with the least estimated peak. `_aim` looks only for
        # decisions near the budget, so it would not find that decision.
        near = not offloads and not (last and in_bytes)
        has_fitting, margin, at_budget_one = False, 0, self.at_budget_one
        perhaps = DEFAULT.compiling.perhaps
        if (
            in_bytes
            and limit
            and not peaks
            and limit < self._estimated(at_budget_one) <= perhaps * limit
        ):
            # The estimate may be too high. Only the compiled step shows whether it fits without further recomputation.
            self.search.pool.add(at_budget_one)
            return at_budget_one.with_provenance(recompute_bound=0)
        if limit is not None:
            # Most estimates are off by less than 2 %, so a step below the budget by this margin needs no second plan.
            margin = max(past.excess, limit // DEFAULT.compiling.margin)
            if near and peaks.keys() <= {at_budget_one.decision}:  # no search was made yet
                self.try_around(self._vertices, limit - margin)
            has_fitting = near and self._aim(limit - margin, peaks)
        if not has_fitting:
            least, most = self._explore()
            if limit is None:
                limit = least + bytes_of_share(budget.peak_share or 0.0, max(0, most - least))
                self.limit = limit
            # No candidate is below the least peak, so the limit minus the margin must not be.
            margin = max(past.excess, min(limit // DEFAULT.compiling.margin, limit - least))
            if near:
                self._aim(limit - margin, peaks)
            elif offloads:
                self._offloading(limit - margin)
        assert limit is not None
        # No bound is proven for peaks of fused code.
        return self._best(budget, past, limit, margin).with_provenance(recompute_bound=0)

    def _refuse_less_than_inputs(self, budget: Budget) -> None:
        """Raise a BudgetError if a budget on the peak is in bytes and below the bytes of parameters and inputs."""
        given = self.input_bytes
        if budget.peak_bytes is not None and budget.peak_bytes < given:
            least, _ = self._explore()  # a search, so that the message can name the least peak
            raise BudgetError(
                f"budget is a peak of {format_bytes(budget.peak_bytes)} ({budget.peak_bytes} bytes), which is infeasible: "
                f"parameters and inputs alone take {format_bytes(given)} ({given} bytes). The least peak of any plan found is "
                f"about {format_bytes(least)} ({least} bytes), estimated under Inductor; budget=remat.Peak(0.0) runs that plan"
                + learned_text(self._context.state.index.nodes)
            )

    def _best(self, budget: Budget, past: CompiledRound, limit: int, margin: int) -> Candidate:
        """Return the candidate to compile next, or an already compiled candidate that should be used."""
        peaks, last = past.peaks, past.is_last(budget)
        pool, at_budget_one, estimated = (
            self.search.pool,
            self.at_budget_one,
            self.search.measures.estimated,
        )
        surcharge = int(ESTIMATED.negligible * self._context.step_cost)
        lowest = min(peaks.values(), default=0)

        def peak_of(candidate: Candidate) -> int:
            return peaks.get(candidate.decision, estimated(candidate))

        # Layers with node orders of their own are less alike, so Inductor compiles more kernels for them. Such a candidate
        # must cost less than others by `surcharge`.
        def rank(candidate: Candidate) -> tuple[int, int]:
            has_own_order = candidate.schedule is not None or candidate.decision.is_ordered
            return candidate.cost + surcharge * has_own_order, peak_of(candidate)

        fresh = CandidatePool(pool.within(Limits(without=peaks)))  # not compiled yet
        dissimilar = CandidatePool[Candidate]()
        if last and lowest > limit + limit // DEFAULT.compiling.far:
            # Estimated peaks are far off for this step. The candidate that saves the fewest bytes differs most from
            # those that were compiled.
            below = limit if budget.peak_bytes else lowest
            dissimilar.add(*fresh.within(Limits(peak_bytes=below, measure=estimated)))
        # No compilation follows the last one, so being within the budget is more important than the cost.
        if last and budget.peak_bytes and fresh and not dissimilar:
            return fresh.best(estimated)
        within = CandidatePool(fresh.within(Limits(peak_bytes=limit - margin, measure=estimated)))
        if not peaks:
            # A plan that may exceed the budget is compiled if it costs at most half of a plan that is most likely
            # within.
            cheapest = within.cheapest(rank=cost_of)
            most = max(at_budget_one.cost, cheapest.cost / 2) if cheapest else math.inf
            possible = fresh.within(Limits(peak_bytes=limit, cost=most, measure=estimated))
            within = CandidatePool(possible) if possible else within
        within.add(*(d for d in pool if peaks.get(d.decision, limit + 1) <= limit))
        # Budget 1 may peak below every compiled step.
        if (
            peaks
            and (last or not within)
            and at_budget_one.decision not in peaks
            and estimated(at_budget_one) < lowest
        ):
            within = (
                CandidatePool(d for d in fresh if d.decision == at_budget_one.decision) or within
            )
        if dissimilar and (budget.peak_bytes or not within):
            best = dissimilar.cheapest(rank=lambda d: d.saved_bytes)
        else:
            best = within.cheapest(rank=rank)
        if best is None and peaks and budget.peak_bytes:
            # Compiling a decision takes long, so a decision whose estimate exceeds the budget is not chosen.
            compiled = CandidatePool(d for d in pool if d.decision in peaks)
            likely = fresh.cheapest(Limits(peak_bytes=limit, measure=estimated), peak_of)
            best = likely or compiled.cheapest(rank=peak_of)
        # Nothing fits: the lowest estimate may be too high, else the lowest peak is the nearest to the budget.
        best = best or fresh.cheapest(rank=peak_of) or pool.cheapest(rank=peak_of)
        assert best is not None, "the search has found candidates"
        return best

    @property
    def at_budget_one(self) -> Candidate:
        """The decision for budget 1, with its tagged values offloaded."""
        return self.search.offloads.with_tagged(self.search.decisions.allowed_at_budget_one)

    @property
    def _vertices(self) -> list[int]:
        """Saved bytes of about `Effort.vertices` vertices of the hull, all of which the user's code allows."""
        most = self._context.most_saved
        return [n for n, _ in self._context.cuts(DEFAULT.vertices) if most is None or n <= most]

    def _explore(self) -> tuple[int, int]:
        """Search for candidates at all peaks up to budget 1; return the estimated peaks for ratios 0 and 1."""
        search = self.search
        at = self.try_saved(without_gaps(self._vertices))
        # The least peak may lie between two limits.
        for _ in range(DEFAULT.compiling.halvings):
            at |= self.try_saved(beside_least(at))
        search.add(search.decisions.allowed_at_budget_one)
        most = self._estimated(search.offloads.with_tagged(search.decisions.at_budget_one))
        if self._context.is_alone:
            search.add(search.least_peak)
        else:
            self._lower()
        return self._estimated(search.pool.best(self._estimated)), max(most, self._most)

    def _lower(self) -> None:
        """Search for decisions with lower estimated peaks than all candidates; add these decisions to the pool."""
        context, search = self._context, self.search
        starts = [saved for _, saved in context.cuts(4 * DEFAULT.vertices)]
        # Each search assumes that fusion saves as many bytes as in the best candidate so far.
        for _ in range(ESTIMATED.lowest):
            best = search.pool.best(self._estimated)
            near = search.near(self._estimated, best)
            candidates = search.lowest(near, [best.saved, *starts], ESTIMATED)
            search.add(*map(search.decisions.credited, candidates))
            if search.pool.best(self._estimated) is best:
                return

    def try_saved(self, capacities: Sequence[int]) -> dict[int, int]:
        """Add to the pool the decision at each limit on saved bytes; return a dict from limit to estimated peak."""
        candidates = {nbytes: self.search.decisions.at(nbytes) for nbytes in capacities}
        self.search.add(*candidates.values())
        with_tagged = self.search.offloads.with_tagged
        return {nbytes: self._estimated(with_tagged(d)) for nbytes, d in candidates.items()}

    def try_around(self, capacities: Sequence[int], wanted: int) -> None:
        """Find the largest limit on saved bytes whose decision has an estimated peak of at most ``wanted``."""
        limits = sorted(capacities)
        low, high = 0, len(limits) - 1
        while low <= high:
            middle = (low + high) // 2
            (peak,) = self.try_saved([limits[middle]]).values()
            low, high = (middle + 1, high) if peak <= wanted else (low, middle - 1)
        # Peaks do not always rise with saved bytes, so bisection may miss the limits whose decisions are within the peak.
        if not self.search.pool.cheapest(self._limits(wanted)):
            for nbytes in reversed(without_gaps(limits)):
                if self.try_saved([nbytes])[nbytes] <= wanted:
                    break

    def _limits(self, wanted: int, peaks: Mapping[Decision, int] | None = None) -> Limits:
        """Return limits that refuse estimated peaks above ``wanted``, and decisions that are in ``peaks``."""
        return replace(self.search.limits(wanted, self._estimated), without=peaks or ())

    def _aim(self, wanted: int, peaks: Mapping[Decision, int]) -> bool:
        """Search for candidates within an estimated peak; return whether an uncompiled candidate is within it."""
        search, limits = self.search, self._limits(wanted, peaks)
        search.add(search.decisions.allowed_at_budget_one)
        if wanted < self.input_bytes:  # nor has any estimate
            return False
        search.propose(limits)
        return search.pool.cheapest(limits, cost_of) is not None

    def _offloading(self, wanted: int) -> None:
        """Search near an estimated peak for decisions that may offload values; add the decisions to the pool."""
        search = self.search
        least = search.least_found
        lowest = search.within_peak(least, offload=False)
        search.pool.add(lowest)
        feasible = search.measures.simulated(lowest)
        step = feasible // DEFAULT.offloading.steps
        # Estimated and simulated peaks differ by similar bytes for similar decisions. Limits far below `feasible` may be
        # infeasible.
        start = max(wanted + feasible - self._estimated(lowest), feasible - step)

        def ask(peak_bytes: int) -> Candidate:
            try:
                return search.within_peak(peak_bytes)
            except BudgetError:  # even with offloads
                return search.within_peak(feasible + step)

        search.pool.add(
            *aim(ask, self._estimated, wanted, start=start, rounds=DEFAULT.offloading.aimed)
        )


def without_gaps(vertices: Sequence[int]) -> list[int]:
    """Return the given limits on saved bytes, with evenly spaced limits added in large gaps between two limits."""
    limits, most = set(vertices), max(1, max(vertices) // DEFAULT.compiling.gap)
    for a, b in pairwise(sorted(vertices)):
        parts = -(-(b - a) // most)
        limits |= {a + (b - a) * k // parts for k in range(1, parts)}
    return sorted(limits)


def beside_least(at: Mapping[int, int]) -> list[int]:
    """Find the limit on saved bytes with the least peak; return the midpoints between it and the adjacent limits."""
    limits = sorted(at)
    k = min(range(len(limits)), key=lambda i: at[limits[i]])
    return [(a + b) // 2 for a, b in pairwise(limits[max(0, k - 1) : k + 2])]
