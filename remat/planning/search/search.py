"""The search for candidates of one graph within a peak, simulated or estimated.

In every search, each proposer yields candidates within limits, and one pool collects these candidates. A measure
computes the peak of each candidate, and the pool chooses the best candidate within the limits.
`remat.planning.search.proposals` lists the proposers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from remat.errors import BudgetError
from remat.planning.context import GraphContext
from remat.planning.reading.plan_text import learned_text
from remat.planning.search.bound import PeakBounds, bound_with_offloads
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT, ESTIMATED, SIMULATED, Effort, Rounds
from remat.planning.search.measures import Measures
from remat.planning.search.near import Near, near_fused
from remat.planning.search.pool import CandidatePool, Limits, Measure, cost_of
from remat.planning.search.proposers.offloads import Offloads
from remat.planning.search.proposers.solver import SolverDecisions
from remat.planning.search.schedules import Schedules
from remat.solvers.graph.lagrangian import Lagrangian
from remat.solvers.run import run
from remat.units import Budget, bytes_of_share, format_bytes

#: Text for error messages: why no budget lowers the peak further, and what else lowers it.
_UNSHRUNK = (
    "Weights, gradients and what one operator needs at once do not shrink with the budget: raise it, or make the "
    "model or the batch smaller"
)


#: A function ``propose(search, limits, seeds)`` that yields candidates; the search adds each candidate to its pool.
#: Candidates may exceed the limits, because the pool chooses. A proposer may start from the seeds, too.
Proposer = Callable[["Search", Limits, Sequence[Candidate]], Iterator[Candidate]]


class Search:
    """Search for candidates of one graph within limits on the peak.

    Args:
        context: the prepared graph.
        proposers: functions that find candidates, in the order in which the search calls them.
        effort: limits on the work of each search.

    Attributes:
        context: the prepared graph.
        effort: limits on the work of each search.
        measures: peaks of the candidates.
        decisions: decisions of the solver at limits on saved bytes.
        pool: all candidates that were found.
        rounds_run: how many searches by prices of memory, and how many searches over node orders, were run.
    """

    def __init__(
        self, context: GraphContext, proposers: Sequence[Proposer], effort: Effort = DEFAULT
    ) -> None:
        self.context, self._proposers, self.effort = context, proposers, effort
        self.measures = Measures(context.state, context.on_progress)
        self.decisions = SolverDecisions(context, self.measures)
        self.pool = CandidatePool[Candidate]()
        self.rounds_run: Counter[str] = Counter()

    @cached_property
    def schedules(self) -> Schedules:
        """Decisions on the graph, each with its schedule and the schedule's peak."""
        return Schedules(self.context)

    @cached_property
    def simulated(self) -> Near:
        """Searches on the graph's own schedule problem, in which the peak of a schedule is the simulated peak."""
        return Near.of(self.schedules, self.effort)

    @property
    def starts(self) -> list[tuple[int, ...]]:
        """Decisions that searches within a peak start from, each as its saved nodes of the graph problem."""
        context, decisions = self.context, self.decisions
        ends = decisions.allowed_cheapest, decisions.allowed_at_budget_one, context.runtime_optimal
        cuts = (saved for _, saved in context.cuts(4 * self.effort.vertices))
        return [*(d.saved for d in ends), *cuts]

    def _around_least(self) -> Iterator[tuple[int, ...]]:
        """Yield decisions between vertices of the hull, next to the vertex with the lowest peak so far."""
        # Between two vertices that are far apart, decisions may have lower peaks than at both.
        context, candidate = self.context, self.schedules.candidate
        cuts = context.cuts(self.effort.vertices)
        peaks = {nbytes: candidate(saved).peak_bytes for nbytes, saved in cuts}
        for _ in range(6):
            limits = sorted(peaks)
            k = min(range(len(limits)), key=lambda i: peaks[limits[i]])
            gaps = [*pairwise(limits[max(0, k - 1) : k + 2])]
            if not gaps:
                return
            low, high = max(gaps, key=lambda gap: gap[1] - gap[0])
            problem = context.lowered.problem.within((low + high) // 2)
            # The decision is only a start of a search, so it needs no proof of optimality.
            saved = run(Lagrangian(work=0), problem).saved
            yield saved
            peaks[(low + high) // 2] = candidate(saved).peak_bytes

    @cached_property
    def bounds(self) -> PeakBounds:
        """Lower bounds on the cost of every decision without offloads, as a function of the limit on the peak."""
        return PeakBounds(self.context.state, self.context.lowered.problem)

    @cached_property
    def offloads(self) -> Offloads:
        """The search for values of the graph to offload to the host's memory."""
        near = self.simulated
        return Offloads(self.context, self.measures, self.decisions, near.prices, near.orders)

    def adopt(self, other: Search) -> bool:
        """Copy decisions and peaks from another trace's search; return False if the graphs or options differ."""
        if not self.context.like(other.context):
            return False
        self.decisions.adopt(other.decisions)
        self.measures.adopt(other.measures)
        # The graph of the other trace has nodes of its own, with the same names.
        self.pool.add(*(replace(d, lowered=self.context.lowered) for d in other.pool))
        return True

    def add(self, *candidates: Candidate) -> None:
        """Add to the pool those candidates that the user's code allows, with the user's tagged values offloaded."""
        allowed = filter(self.context.may_save, candidates)
        self.pool.add(*map(self.offloads.with_tagged, allowed))

    def limits(self, peak_bytes: int, measure: Measure | None = None) -> Limits:
        """Return limits that allow candidates with a peak of at most ``peak_bytes``, simulated or by ``measure``."""
        return Limits(
            peak_bytes=peak_bytes,
            saved_bytes=self.context.most_saved,
            measure=measure or self.measures.simulated,
        )

    def within_peak(self, peak_bytes: int, *, offload: bool = True) -> Candidate:
        """Search for candidates whose simulated peak is within a limit; return the cheapest candidate found.

        Args:
            peak_bytes: limit on the peak, in bytes.
            offload: whether untagged values may be offloaded. Tagged values are offloaded in any case.

        Raises:
            BudgetError: no candidate was found within the limit; the message names the least peak that was found.
        """
        context, limits = self.context, replace(self.limits(peak_bytes), offload=offload)
        budget = f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes)"
        # Hooks may pack saved values into fewer bytes, so the bound on the peak does not hold with hooks.
        possible = 0 if context.request.hooks else self.schedules.least_possible
        self.add(self.decisions.allowed_cheapest)
        # The decision of least cost ends the search, unless offloads may be cheaper than its recomputation.
        if not self.is_solved(limits) or (offload and context.may_offload):
            if peak_bytes < possible:
                raise self._none_within(budget, possible, infeasible=True)
            context.on_progress(f"searching within a peak of {format_bytes(peak_bytes)}")
            self.propose(limits)
        best = self.pool.cheapest(limits, self._by_cost)
        if best is None:
            raise self._none_within(budget, possible)
        return self._bounded(best, peak_bytes)

    def choose_again(self, candidates: Mapping[int, Candidate]) -> dict[int, Candidate]:
        """For each limit on the simulated peak, choose again among all candidates found so far for any limit."""
        # The result: no larger limit has a higher cost than a smaller limit, and no smaller limit has the higher peak.
        pool = CandidatePool([*candidates.values(), *self.pool])
        chosen = {}
        for peak_bytes, before in candidates.items():
            best = pool.cheapest(self.limits(peak_bytes), self._by_cost)
            same = best is None or best.decision == before.decision
            chosen[peak_bytes] = before if same or best is None else self._bounded(best, peak_bytes)
        return chosen

    def _by_cost(self, candidate: Candidate) -> tuple[int, int, int]:
        """Return a candidate's sort key (cost, simulated peak, saved bytes)."""
        return candidate.cost, self.measures.simulated(candidate), candidate.saved_bytes

    def propose(self, limits: Limits, *seeds: Candidate) -> None:
        """Let each proposer find candidates within limits, and add all these candidates to the pool.

        Args:
            limits: the limits, with the measure of the peak.
            seeds: candidates to start from, in addition to those that each proposer starts from.
        """
        self.add(*seeds)
        for proposer in self._proposers:
            for candidate in proposer(self, limits, seeds):
                self.add(candidate)

    def searched(self, limits: Limits, *seeds: Candidate) -> Candidate | None:
        """Return the cheapest candidate found within limits that offloads only tagged values; None if there is none."""
        self.propose(replace(limits, offload=False), *seeds)
        best = self.recomputing(limits)
        return None if best is None else self._bounded(best, int(limits.peak_bytes))

    # ---- for proposers ---------------------------------------------------------------------------
    def rounds(self, measure: Measure) -> Rounds:
        """Return the parameters of searches for candidates within a limit on the peak, for the given measure."""
        return SIMULATED if self.is_exact(measure) else ESTIMATED

    def is_exact(self, measure: Measure) -> bool:
        """Return whether a measure is the simulated peak, which the graph's own schedule problem gives exactly."""
        return measure == self.measures.simulated

    def recomputing(self, limits: Limits) -> Candidate | None:
        """Return the pool's cheapest candidate within limits that offloads only tagged values, or None."""
        return self.pool.cheapest(replace(limits, offload=False), cost_of)

    def is_solved(self, limits: Limits) -> bool:
        """Return whether some candidate within the limits is so cheap that the search can end."""
        least = int(self.rounds(limits.measure).negligible * self.context.step_cost)
        if self.is_exact(limits.measure):
            # Without node orders of its own, no decision costs less than this end of the hull.
            least = max(least, self.context.hull.ends[1].cost)
        return self.recomputing(replace(limits, cost=least)) is not None

    def near(self, measure: Measure, candidate: Candidate | None) -> Near:
        """Return searches near a candidate, on a schedule problem whose peaks are measured peaks plus a constant."""
        if candidate is None or self.is_exact(measure):
            return self.simulated
        return near_fused(self.measures.split_of(candidate), self.schedules, self.effort)

    def nearest(self, limits: Limits) -> Candidate:
        """Return the candidate of the pool whose peak is nearest to the limit on the peak."""
        return self.pool.best(lambda d: abs(limits.measure(d) - limits.peak_bytes))

    def _none_within(self, budget: str, possible: int, *, infeasible: bool = False) -> BudgetError:
        """Return the error to raise if no plan was found within a limit on the peak."""
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
            f"{budget}{why}. The least peak of any plan found is {format_bytes(least)} ({least} bytes); "
            f"{context.request.how_to_run(least)}. {_UNSHRUNK}{held}{learned_text(context.state.index.nodes)}"
        )

    def peak_of(self, budget: Budget, ends: tuple[int, int] | None = None) -> int:
        """Convert a budget on the peak to bytes; ``ends`` are the peaks that the ratios 0 and 1 stand for.

        Without ``ends``, ratio 0 stands for the least peak found, and ratio 1 for the peak of the plan for budget 1.
        """
        if budget.peak_bytes is not None:
            return budget.peak_bytes
        at_budget_one = self.decisions.allowed_at_budget_one
        least, most = ends or (self.least_found, self.measures.simulated(at_budget_one))
        return least + bytes_of_share(budget.peak_share or 0.0, most - least)

    @cached_property
    def least_found(self) -> int:
        """The least simulated peak of three candidates: `least_peak`, the candidate for budget 1, and the cheapest."""
        decisions = self.decisions
        ends = self.least_peak, decisions.allowed_cheapest, decisions.allowed_at_budget_one
        return min(map(self.measures.simulated, ends))

    @cached_property
    def least_peak(self) -> Candidate:
        """The candidate with the lowest peak that the search found.

        With the solver ``auto``, remat searches for the candidate with the least peak. If the user named another
        solver, the candidate is the one with the least peak among this solver's decisions at several limits on saved
        bytes.
        """
        context, decisions = self.context, self.decisions
        pool = CandidatePool([decisions.allowed_at_budget_one])
        if context.is_alone:
            pool.add(*decisions.on_frontier())
        else:
            # With hooks, which pack saved values, the lowest peak of the search may not be that of the step. Therefore,
            # decisions at several limits on saved bytes compete, too.
            if context.request.hooks:
                pool.add(*decisions.on_frontier())
            pool.add(
                *map(
                    decisions.credited,
                    self.lowest(self.simulated, [*self.starts, *self._around_least()]),
                )
            )
        self.add(*pool)
        # The decision at budget 1 is allowed, so there is one.
        allowed = CandidatePool(filter(context.may_save, pool))
        return allowed.best(lambda d: (self.measures.simulated(d), d.cost))

    def lowest(
        self, near: Near, seeds: Iterable[Iterable[int]], rounds: Rounds = SIMULATED
    ) -> list[Candidate]:
        """Search for the candidate with the least peak in a schedule problem.

        Args:
            near: the searches of the schedule problem.
            seeds: decisions to start from, each as its saved nodes of the graph problem; at least one.
            rounds: numbers that determine how many edits a search over node orders tries.

        Returns:
            One or two candidates. The first candidate is the best one in the node order of the passes. The second
            candidate, if one was found, is the best one with its own node orders, and may save more bytes than the
            user's code allows.
        """
        # No schedule has a peak of 0 bytes, so under this limit the search returns the lowest peaks that it reaches.
        limits = Limits(peak_bytes=0, saved_bytes=self.context.most_saved)
        reached = CandidatePool(near.prices.reached(limits, seeds))
        best = reached.best(limits.rank)
        lower = None if self.context.request.hooks else near.orders.lowest(reached, rounds.lower)
        return [best] if lower is None else [best, lower]

    def _bounded(self, candidate: Candidate, peak_bytes: int) -> Candidate:
        """Return a copy of a candidate with a lower bound on the cost of every decision within ``peak_bytes``."""
        if candidate.decision == self.decisions.allowed_cheapest.decision:
            return candidate
        # The bound that `candidate` has may hold for a limit on saved bytes, so it does not hold for a peak.
        context, bound = self.context, 0
        if (
            not context.request.hooks
        ):  # hooks may pack saved values into fewer bytes, so nothing is proven
            program_points = self.schedules.highest(self.schedules.candidate(candidate.saved))
            if context.may_offload:
                bound = bound_with_offloads(context, self.bounds, peak_bytes, program_points)
            else:
                bound = self.bounds.bound(peak_bytes, program_points)
        return candidate.with_provenance(recompute_bound=bound)
