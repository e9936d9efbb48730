"""Passes by which a solver chooses the saved values within a memory budget, and their base class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import BudgetError, PlanError
from remat.graph.collection import paused_collection
from remat.graph.costs import CostModel, Roofline
from remat.graph.problems.region_budgets import region_budget
from remat.passes.core.base import Pass, Stage
from remat.passes.core.provenance import Provenance, SavedLimits
from remat.passes.core.state import Analysis, PassResult, State
from remat.passes.decide.least_causes import least_causes
from remat.passes.decide.min_cut import MinCut, RuntimeOptimalCut, find_cut, require_tangents
from remat.solvers.auto import is_auto
from remat.solvers.base import Solver
from remat.solvers.graph.cut import CutSolver
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.problem import GraphProblem, evaluate
from remat.solvers.run import run
from remat.solvers.solution import GraphSolution, Status
from remat.units import Budget

#: Largest number of nodes for which `Budgeted.decide` tries lower budgets in steps of 1/1,000 of the bytes
#: that the runtime-optimal cut saves. For a problem with more nodes, the steps are 1/100 of these bytes.
FINE_UP_TO = 1_000
#: Lower budgets are tried only if the gap between the cost of the solution and its proven lower bound is at
#: most this fraction of the cost.
CLOSE = 0.01


@dataclass(frozen=True)
class Budgeted(Pass):
    """Base class of the passes that keep the saved bytes within a budget.

    Attributes:
        solver: the solver that decides; set by the code that composes the pipeline.
        budget: the limit on the saved bytes. Running the pass under a budget on the peak raises a
            `BudgetError`.
        cost: the cost model.
        time_limit: time limit of the solver in seconds; 0: no limit.
    """

    stage: ClassVar[Stage] = Stage.DECIDE
    #: Whether the solver gets knapsack problems even if it can solve graph problems.
    knapsack: ClassVar[bool] = False

    solver: Solver | None = None
    budget: Budget = Budget(share=1.0)
    cost: CostModel = Roofline()
    time_limit: float = 0.0

    def run(self, state: State) -> PassResult:
        refuse_peak_in_pass(self.budget, self.name)
        limits = self.limits(state)
        solution, provenance = self.decide(state, limits)
        decision = state.lowered(self.cost).decision(solution.saved)
        return PassResult(
            state=replace(state, decision=decision, limits=limits, provenance=provenance),
            modified=True,
            detail=f"{solution.saved_bytes} of {limits.capacity} bytes saved, by {provenance.solver}",
        )

    @paused_collection()
    def limits(self, state: State) -> SavedLimits:
        """Return the limits on the saved bytes, from the pass's budget and the budget that the user's code sets.

        Raises:
            PlanError: the graph has no tangents, or recompute tags conflict.
            BudgetError: a budget in bytes is below the least possible bytes, or the region budgets
                in the user's code are invalid.
        """
        require_tangents(state)
        full_bytes, least = full_and_least(state)
        own = state.get(RegionBudget())
        budgets = [self.budget]
        if own is not None:  # replaces the pass's ratio, but holds together with a budget in bytes
            budgets = [*([] if self.budget.nbytes is None else budgets), Budget(share=own)]
        raised = any(b.below(full_bytes=full_bytes, least=least) for b in budgets)
        why = least_causes(state, state.get(LeastDecision())) if raised else ("", "")
        return SavedLimits(
            capacity=min(b.capacity(full_bytes=full_bytes, least=least, why=why) for b in budgets),
            full_bytes=full_bytes,
            least_bytes=least,
            region_budget=own,
            least_because=why[0],
        )

    def decide(self, state: State, limits: SavedLimits) -> tuple[GraphSolution, Provenance]:
        """Choose the values to save within ``limits.capacity`` bytes, at the least recompute cost.

        Returns:
            The solution of least cost; and its provenance: the solver's name, the solver's time and
            the proven lower bound on the cost.

        Raises:
            PlanError: the pass has no solver, or recompute tags conflict.
            BudgetError: the capacity is below the least possible bytes.
            SolverError: as from `remat.solvers.run.run`.
        """
        solver = self.required_solver()
        capacity, full_bytes = limits.capacity or 0, limits.full_bytes or 0
        problem = state.lowered(self.cost).problem.within(capacity)
        by_items = self.knapsack or "graph" not in solver.solves
        cuts = self._cuts(
            state,
            every=by_items or isinstance(solver, CutSolver),
            full_bytes=full_bytes <= capacity,
        )
        problem = problem.with_hints(cuts)
        hull = None if by_items else Hull.of(problem)  # the reference keeps the hull in its cache
        solutions = [self.solved(problem)]
        if not isinstance(solver, CutSolver):
            if hull is not None:
                # A larger budget should never give a costlier plan. A solution within a smaller budget is also legal
                # within the given one, so some smaller budgets are tried too.
                solutions += self._lower_rungs(problem, hull, solutions[0], limits)
            if is_auto(solver):  # a solver that the user named does not consider the cuts
                solutions += self._cut_solutions(problem, solutions[0])
        best = min(solutions, key=lambda s: (s.cost, s.saved_bytes))
        return best, Provenance(
            solver=best.solver,
            items=len(problem),
            elapsed_s=sum(f.elapsed_s for f in solutions),
            deterministic=all(f.deterministic for f in solutions),
            recompute_bound=min(best.cost, solutions[0].bound),
        )

    def solved(self, problem: GraphProblem) -> GraphSolution:
        """Solve a graph problem with the pass's solver and time limit, and return the checked solution.

        Raises:
            BudgetError: no solution is within the problem's capacity.
            SolverError: as in `remat.solvers.run.run`.
        """
        limit = self.time_limit or None
        return run(self.required_solver(), problem, time_limit=limit, knapsack=self.knapsack)

    def _cuts(self, state: State, *, every: bool, full_bytes: bool) -> tuple[tuple[int, ...], ...]:
        """Return the nodes that the minimum cut saves under each set of ban rules, strictest rules first."""
        rules = state.cut_rules
        if full_bytes or not every:
            return (state.get(RuntimeOptimalCut(rules)),)
        looser = replace(
            rules,
            ban_used_far_apart=False,
            ban_long_fusible_chains=False,
            ban_materialized_backward=False,
        )
        loosest = replace(looser, ban_not_in_allowlist=False)
        return tuple(
            dict.fromkeys(state.get(RuntimeOptimalCut(r)) for r in (rules, looser, loosest))
        )

    def _lower_rungs(
        self, problem: GraphProblem, hull: Hull, solution: GraphSolution, limits: SavedLimits
    ) -> Iterator[GraphSolution]:
        """Yield solutions for lower budgets, where an inexact solver may find a decision that costs less."""
        # A solver that stops within a tolerance of the optimum may find a cheaper decision for a smaller budget.
        # Lower budgets are fixed fractions of all bytes, so the best solution costs no more than the plan at any of
        # these budgets.
        best, full_bytes = solution.cost, limits.full_bytes or 0
        if solution.status is Status.OPTIMAL or self.time_limit or not full_bytes:
            return
        capacity, least = limits.capacity or 0, limits.least_bytes or 0
        bound = max(solution.bound, hull.edge(capacity).bound(capacity))
        if best - bound > CLOSE * best:
            return
        parts = 1_000 if len(problem) <= FINE_UP_TO else 100
        for k in range(-(-capacity * parts // full_bytes) - 1, 0, -1):
            rung = k * full_bytes // parts
            if rung <= least or hull.edge(rung).bound(rung) >= best:
                return
            if rung < capacity:
                lower = self.solved(problem.within(rung))
                best = min(best, lower.cost)
                yield lower
                if lower.bound >= best:  # no smaller budget can be cheaper than this bound
                    return

    @staticmethod
    def _cut_solutions(problem: GraphProblem, solution: GraphSolution) -> Iterator[GraphSolution]:
        """Yield, as solutions, those minimum cuts in ``problem.hints`` whose saved bytes are within the budget."""
        for saved in problem.hints if solution.status is not Status.OPTIMAL else ():
            evaluation = evaluate(problem, saved)
            if evaluation.saved_bytes <= (problem.capacity or 0):
                yield GraphSolution(
                    saved=evaluation.saved,
                    cost=evaluation.recompute_cost,
                    saved_bytes=evaluation.saved_bytes,
                    bound=0,  # a cut proves nothing about other decisions
                    status=Status.FEASIBLE,
                    solver=MinCut.name,
                    elapsed_s=0.0,
                )

    def required_solver(self) -> Solver:
        """Return the solver of the pass.

        Raises:
            PlanError: the pass has no solver.
        """
        if self.solver is None:
            raise PlanError(
                f"the {self.name} pass was given no solver; hand it one, for example "
                f"{type(self).__name__}(solver=remat.plugins.registry().solver('greedy'), budget=...)"
            )
        return self.solver


@dataclass(frozen=True)
class Knapsack(Budgeted):
    """Keep the saved bytes within a budget, by a knapsack problem of the operators that cost time to recompute.

    The solver picks the operators that must not be recomputed. A minimum cut then finds the fewest
    bytes to save so that no picked operator is recomputed; see `remat.solvers.graph.completion`.
    """

    name: ClassVar[str] = "knapsack"
    knapsack: ClassVar[bool] = True


@dataclass(frozen=True)
class SolveGraph(Budgeted):
    """Keep the saved bytes within a budget at the least recompute cost that a solver finds.

    The solver decides on all nodes of the graph problem together. A solver that only solves
    knapsack problems is used as in the pass `Knapsack`.
    """

    name: ClassVar[str] = "solve-graph"


def refuse_peak_in_pass(budget: Budget, name: str) -> None:
    """Refuse a budget on the peak in a pipeline, because passes bound saved bytes only.

    Raises:
        BudgetError: the budget bounds the peak.
    """
    if budget.on_peak:
        saved = "" if budget.peak_bytes is None else f"budget=saved:{budget.peak_bytes}B, or "
        raise BudgetError(
            f"the pass '{name}' was given a budget on the peak ({budget.label}), but a pass bounds saved bytes; write "
            f"{saved}a ratio such as budget=0.5, or let remat.plan search within the peak, without a pipeline"
        )


@dataclass(frozen=True)
class RegionBudget(Analysis[float | None]):
    """The budget ratio that the user's code sets for the graph; None if the code sets none.

    The user's code sets the ratio with ``torch.autograd.graph.region_activation_memory_budget``.
    """

    name: ClassVar[str] = "region-budget"

    def compute(self, state: State) -> float | None:
        return region_budget(state.joint, state.index, state.roles)


def full_and_least(state: State) -> tuple[int, int]:
    """Return the bytes that the runtime-optimal cut saves, and the fewest bytes that a decision can save."""
    # `max` makes the first number at least as large as the second.
    size = state.lowered().problem.size
    least = sum(size[i] for i in state.get(LeastDecision()))
    return max(least, sum(size[i] for i in state.get(RuntimeOptimalCut(state.cut_rules)))), least


@dataclass(frozen=True)
class LeastDecision(Analysis[tuple[int, ...]]):
    """The nodes of the graph problem that are saved by the decision with the fewest saved bytes."""

    name: ClassVar[str] = "least-decision"

    def compute(self, state: State) -> tuple[int, ...]:
        return find_cut(state, [False] * len(state.lowered().problem), biased=False)
