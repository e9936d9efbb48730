"""The solver's decisions at limits on saved bytes; each decision is computed once and cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial

from remat.arguments import SOLVER
from remat.passes.core.provenance import SavedLimits
from remat.planning.context import COST_ERROR, GraphContext
from remat.planning.request import PlanRequest
from remat.planning.search.candidates import Candidate
from remat.planning.search.measures import Measures
from remat.planning.search.pool import CandidatePool, Limits
from remat.solvers.graph.pareto import pareto
from remat.units import format_bytes

#: How a decision of the solver within a number of saved bytes was found.
BY_SOLVER = "of the solver"


class SolverDecisions:
    """The decisions of the request's solver on one graph, at any limits on saved bytes.

    Args:
        context: the prepared graph.
        measures: peaks of the graph's candidates.

    Attributes:
        proposed: how many candidates of the graph each proposer has found.
    """

    def __init__(self, context: GraphContext, measures: Measures) -> None:
        self._context, self._measures = context, measures
        self._deciding = context.request.deciding()
        self._at: dict[int, Candidate] = {}
        self.proposed: Counter[str] = Counter()

    def at(self, capacity: int) -> Candidate:
        """Return the solver's cached decision within ``capacity`` saved bytes.

        The caller must respect the budget that the user's code sets for the graph, if any.
        """
        if capacity not in self._at:
            self._context.on_progress(f"deciding at {format_bytes(capacity)}")
            candidate = self.search_within(replace(self._context.limits, capacity=capacity))
            self._at[capacity] = candidate.with_provenance(proposer=BY_SOLVER)
            self.proposed[BY_SOLVER] += 1
        return self._at[capacity]

    def search_within(self, limits: SavedLimits, request: PlanRequest | None = None) -> Candidate:
        """Return a solver's decision within limits on saved bytes; the decision is not cached.

        Args:
            limits: the limits on saved bytes.
            request: the options, with the solver to call; None: those of the graph.
        """
        context = self._context
        # Hulls are cached weakly. This reference keeps one alive, so that every decision shares it.
        _ = context.hull
        deciding = self._deciding if request is None else request.deciding()
        solution, provenance = deciding.decide(context.state, limits)
        return Candidate(
            lowered=context.lowered,
            saved=solution.saved,
            saved_bytes=solution.saved_bytes,
            cost=solution.cost,
            provenance=provenance,
            limits=limits,
        )

    @cached_property
    def at_budget_one(self) -> Candidate:
        """The decision under budget 1, which saves at most as many bytes as the runtime-optimal partition.

        If the user named a solver, the decision is that of this solver. The default solver's decision is compared with
        the runtime-optimal partition in `_better_than_cut`.
        """
        solved = partial(self.at, self._context.full_bytes)
        return solved() if self._context.is_alone else self._better_than_cut(solved)

    @cached_property
    def without_remat(self) -> Candidate:
        """The default solver's decision under budget 1, which is the decision of the step without remat."""
        # All solvers are compared with the same step.
        context = self._context
        if not context.is_alone:
            return self.at_budget_one
        usual = replace(context.request.by(SOLVER), time_limit=None)
        limits = replace(context.limits, capacity=context.full_bytes)
        return self._better_than_cut(partial(self.search_within, limits, usual))

    def _better_than_cut(self, solved: Callable[[], Candidate]) -> Candidate:
        """For budget 1, return the runtime-optimal partition, or the solver's decision if that is surely better."""
        context, measures = self._context, self._measures
        # A step without a budget must be no worse than without remat, although costs and estimated peaks have errors.
        cut, error = context.runtime_optimal, COST_ERROR * context.step_cost
        bound = context.hull.edge(context.full_bytes).bound(context.full_bytes)
        if cut.cost - bound > error:  # else the solver cannot be surely better, and is not called
            candidate = solved()
            peak = measures.simulated if context.is_eager else measures.estimated
            if cut.cost - candidate.cost > error and peak(candidate) <= peak(cut):
                return candidate
        proven = replace(cut.provenance, recompute_bound=min(cut.cost, bound))
        limits = replace(context.limits, capacity=context.full_bytes)
        return replace(cut, provenance=proven, limits=limits)

    @cached_property
    def cheapest(self) -> Candidate:
        """The decision with the least recompute cost, with no limit on saved bytes."""
        context = self._context
        return self.at(max(context.hull.ends[1].saved_bytes, context.full_bytes))

    @property
    def allowed_at_budget_one(self) -> Candidate:
        """The decision at budget 1, or within fewer saved bytes if the user's code allows only fewer."""
        most = self._context.most_saved
        return self.at_budget_one if most is None else self.at(min(most, self._context.full_bytes))

    @property
    def allowed_cheapest(self) -> Candidate:
        """The decision with the least recompute cost, among those that the user's code allows."""
        return self.cheapest if self._context.most_saved is None else self.allowed_at_budget_one

    def on_frontier(self) -> Iterator[Candidate]:
        """Yield the decision at each limit of `GraphContext.capacities` that the user's code allows."""
        return map(self.at, self._context.capacities(self._context.most_saved))

    def pareto(self) -> tuple[Candidate, ...]:
        """Return the Pareto-optimal decisions at the limits of `GraphContext.capacities`, fewest saved bytes first."""
        candidates = map(self.at, self._context.capacities())
        return tuple(pareto(candidates, lambda d: (d.saved_bytes, d.cost)))

    def swept(self, limits: Limits) -> Iterator[Candidate]:
        """Yield decisions at falling limits on saved bytes, then at limits just above the best decision's bytes."""
        context = self._context
        capacities = context.capacities(context.most_saved)
        first = self.allowed_at_budget_one if context.is_alone else context.runtime_optimal
        pool = CandidatePool([first] if context.may_save(first) else [])
        for c in reversed(capacities):
            # Limits fall in this loop, and the lower bound on the cost rises. Once the bound reaches the least cost so
            # far, no further limit gives a cheaper decision.
            best = pool.cheapest(limits)
            if best and context.hull.edge(c).bound(c) >= best.cost:
                break
            pool.add(self.at(c))
        yield from pool
        best = pool.cheapest(limits)
        if best is None:
            return
        # A limit between the best one and the next higher one may give a better decision.
        low = best.saved_bytes
        high = min((c for c in capacities if c > low), default=low)
        for _ in range(6):
            if high - low <= low // 1000:
                return
            middle = (low + high) // 2
            decided = self.at(middle)
            yield decided
            fits = limits.measure(decided) <= limits.peak_bytes
            low, high = (middle, high) if fits else (low, middle)

    def credited(self, candidate: Candidate, proposer: str = "") -> Candidate:
        """Return a copy of a candidate that records which search by peak found it.

        Args:
            candidate: the candidate.
            proposer: how the candidate was found; empty: by node orders if it has a schedule, or by prices otherwise.
        """
        proposer = proposer or ("by node orders" if candidate.schedule is not None else "by prices")
        self.proposed[proposer] += 1
        # The search starts from the cached decisions. So the time of these decisions is included, and the search is
        # deterministic only if each decision is.
        solved = [d.provenance for d in self._at.values()]
        provenance = replace(
            candidate.provenance,
            proposer=proposer,
            solver=self._deciding.required_solver().name,
            items=len(self._context.lowered.problem),
            elapsed_s=sum(p.elapsed_s for p in solved),
            deterministic=candidate.provenance.deterministic
            and all(p.deterministic for p in solved),
            recompute_bound=0,
        )
        return replace(candidate, provenance=provenance, limits=None)

    def adopt(self, other: SolverDecisions) -> None:
        """Copy the solver's decisions that were made on another, equal graph."""
        lowered = self._context.lowered
        self._at |= {n: replace(d, lowered=lowered) for n, d in other._at.items()}
        if "at_budget_one" in vars(other):
            self.at_budget_one = replace(other.at_budget_one, lowered=lowered)
