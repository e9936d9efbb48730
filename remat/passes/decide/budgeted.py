"""Deciding under a memory budget: the options of the passes that do, their limits, and the one objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import BudgetError, PlanError
from remat.graph.collection import paused_collection
from remat.graph.costs import CostModel, Roofline
from remat.graph.region_budgets import region_budget
from remat.passes.core.base import Pass, Stage
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import Analysis, PassResult, State
from remat.passes.decide.least_causes import least_causes
from remat.passes.decide.min_cut import MinCut, RuntimeOptimalCut, find_cut, require_tangents
from remat.solvers.auto import is_auto
from remat.solvers.base import Solver
from remat.solvers.cut import CutSolver
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.hull import Hull
from remat.solvers.run import run
from remat.solvers.solution import GraphSolution, Status
from remat.units import Budget

#: Where lower budgets are tried, they are shares of so many parts on problems of up to so many nodes.
RUNGS = ((1_000, 1_000), (100, 10**9))
#: Lower budgets are tried where the gap to the bound is at most this share of the cost.
CLOSE = 0.01


@dataclass(frozen=True)
class Budgeted(Pass):
    """Base of the passes that keep the saved bytes within a budget.

    Attributes:
        solver: who decides; handed over by whoever composes the pipeline.
        budget: the budget, as `remat.plan` reads it.
        cost: the cost model.
        time_limit: seconds for the solver; no clock where 0.
    """

    stage: ClassVar[Stage] = Stage.DECIDE
    #: Whether the solver is given knapsacks, even if it can decide graphs.
    knapsack: ClassVar[bool] = False

    solver: Solver | None = None
    budget: Budget = Budget(share=1.0)
    cost: CostModel = Roofline()
    time_limit: float = 0.0

    def run(self, state: State) -> PassResult:
        refuse_peak_in_pass(self.budget, self.name)
        found, choice = self.decide(state, self.limits(state))
        decision = state.lowered(self.cost).decision(found.saved)
        return PassResult(
            state=replace(state, decision=decision, choice=choice),
            modified=True,
            detail=f"{found.saved_bytes} of {choice.capacity} bytes saved, by {choice.solver}",
        )

    @paused_collection()
    def limits(self, state: State) -> DecisionInfo:
        """The bytes that a decision has to do with.

        Raises:
            PlanError: nothing is differentiated, or tags conflict.
            BudgetError: the budget is below the least possible, or does not go together with what
                the code sets for its regions.
        """
        require_tangents(state)
        full, least = full_and_least(state)
        own = state.get(RegionBudget())
        shares = (self.budget, *(() if own is None else (Budget(share=own),)))
        raised = any(b.below(full=full, least=least) for b in shares)
        why = least_causes(state, least_decision(state)) if raised else ("", "")
        return DecisionInfo(
            capacity=capacity_under(self.budget, own, full=full, least=least, why=why),
            full_bytes=full,
            least_bytes=least,
            region_budget=own,
            least_because=why[0],
        )

    def decide(self, state: State, limits: DecisionInfo) -> tuple[GraphSolution, DecisionInfo]:
        """What to save of the graph problem within ``limits.capacity`` bytes, and how that came about.

        The objective at every budget is the least cost within its bytes. That more bytes never cost
        more than fewer do is ensured as far as that takes little time: see `_lower_rungs`.

        Raises:
            PlanError: no solver was given, or tags conflict.
            BudgetError: the capacity is below the least possible.
            SolverError: as from `remat.solvers.run.run`.
        """
        solver = self.asked()
        capacity, full = limits.capacity or 0, limits.full_bytes or 0
        problem = state.lowered(self.cost).problem.within(capacity)
        by_items = self.knapsack or "graph" not in solver.solves
        cuts = self._cuts(
            state, every=by_items or isinstance(solver, CutSolver), full=full <= capacity
        )
        problem = problem.knowing(cuts)
        hull = None if by_items else Hull.of(problem)  # held, so that every solver call shares it
        found = [self._solved(problem)]
        if not isinstance(solver, CutSolver):
            if hull is not None:
                found += self._lower_rungs(problem, hull, found[0], limits)
            if is_auto(solver):  # a named solver decides alone
                found += self._cut_solutions(problem, found[0])
        best = min(found, key=lambda s: (s.cost, s.saved_bytes))
        return best, replace(
            limits,
            solver=best.solver,
            items=len(problem),
            elapsed_s=sum(f.elapsed_s for f in found),
            deterministic=all(f.deterministic for f in found),
            recompute_bound=min(best.cost, found[0].bound),
        )

    def _solved(self, problem: GraphProblem) -> GraphSolution:
        limit = self.time_limit or None
        return run(self.asked(), problem, time_limit=limit, knapsack=self.knapsack)

    def _cuts(self, state: State, *, every: bool, full: bool) -> tuple[tuple[int, ...], ...]:
        """What the minimum cuts by the rules save, the strictest first.

        The looser ones are computed only where they are of use (``every``) and the strictest does not
        fit (``full`` says whether it does).
        """
        rules = state.cut_rules
        if full or not every:
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
        self, problem: GraphProblem, hull: Hull, found: GraphSolution, choice: DecisionInfo
    ) -> Iterator[GraphSolution]:
        """Solutions at lower budgets that may be cheaper than the solution at this one.

        A solver that stops within a tolerance of the optimum may find a cheaper decision for a
        slightly smaller budget. So it is asked about lower budgets too, which are shares of a fixed
        number of parts: a plan then costs no more than the plan of any such share below its budget.
        It is not asked where the optimum is proven, where the gap is wide, nor below a budget whose
        bound is higher than the cost found.
        """
        best, full = found.cost, choice.full_bytes or 0
        if found.status is Status.OPTIMAL or self.time_limit or not full:
            return
        capacity, least = choice.capacity or 0, choice.least_bytes or 0
        bound = max(found.bound, hull.edge(capacity).bound(capacity))
        if best - bound > CLOSE * best:
            return
        parts = next(parts for parts, nodes in RUNGS if len(problem) <= nodes)
        for k in range(-(-capacity * parts // full) - 1, 0, -1):
            rung = k * full // parts
            if rung <= least or hull.edge(rung).bound(rung) >= best:
                return
            if rung < capacity:
                lower = self._solved(problem.within(rung))
                best = min(best, lower.cost)
                yield lower
                if lower.bound >= best:  # and at still lower ones, nothing costs less than that
                    return

    @staticmethod
    def _cut_solutions(problem: GraphProblem, found: GraphSolution) -> Iterator[GraphSolution]:
        """The cuts that fit, if what the solver found is not proven to be the best."""
        for saved in problem.known if found.status is not Status.OPTIMAL else ():
            done = evaluate(problem, saved)
            if done.saved_bytes <= (problem.capacity or 0):
                yield GraphSolution(
                    saved=done.saved,
                    cost=done.recompute_cost,
                    saved_bytes=done.saved_bytes,
                    bound=0,
                    status=Status.FEASIBLE,
                    solver=MinCut.name,
                    elapsed_s=0.0,
                )

    def asked(self) -> Solver:
        """The solver that was handed over.

        Raises:
            PlanError: none was.
        """
        if self.solver is None:
            raise PlanError(
                f"the {self.name} pass was given no solver; hand it one, for example "
                f"{type(self).__name__}(solver=remat.plugins.registry().solver('greedy'), budget=...)"
            )
        return self.solver


def capacity_under(
    budget: Budget, own: float | None, *, full: int, least: int, why: tuple[str, str] = ("", "")
) -> int:
    """The bytes that one graph may save.

    Args:
        budget: the budget that was asked for.
        own: the share that the code sets for its region. It holds instead of a share; bytes hold
            as well.
        full: bytes that the runtime-optimal partition saves.
        least: the least that any plan saves.
        why: as in `Budget.capacity`.

    Raises:
        BudgetError: a byte budget below ``least``.
    """
    if own is None:
        return budget.capacity(full=full, least=least, why=why)
    allowed = Budget(share=own).capacity(full=full, least=least)
    if budget.nbytes is None:
        return allowed
    return min(allowed, budget.capacity(full=full, least=least, why=why))


def refuse_peak_in_pass(budget: Budget, name: str) -> None:
    """Refuse a budget on the peak in a pipeline, whose passes decide by saved bytes.

    Raises:
        BudgetError: the budget is one on the peak.
    """
    if budget.on_peak:
        saved = "" if budget.peak_bytes is None else f"budget=saved:{budget.peak_bytes}B, or "
        raise BudgetError(
            f"the pass '{name}' was given a budget on the peak ({budget.label}), but a pass bounds saved bytes; write "
            f"{saved}a ratio such as budget=0.5, or let remat.plan search within the peak, without a pipeline"
        )


@dataclass(frozen=True)
class RegionBudget(Analysis[float | None]):
    """The budget ratio that the code sets for the graph; None if it sets none."""

    name: ClassVar[str] = "region-budget"
    summary: ClassVar[str] = "the budget that the code sets for its region"

    def compute(self, state: State) -> float | None:
        return region_budget(state.joint, state.index, state.roles)


def full_and_least(state: State) -> tuple[int, int]:
    """Bytes that the runtime-optimal cut saves, and the least that any decision saves."""
    size = state.lowered().problem.size
    least = sum(size[i] for i in least_decision(state))
    return max(least, sum(size[i] for i in state.get(RuntimeOptimalCut(state.cut_rules)))), least


def least_decision(state: State) -> tuple[int, ...]:
    """The decision that saves the fewest bytes that any decision can."""
    return state.get(LeastDecision())


@dataclass(frozen=True)
class LeastDecision(Analysis[tuple[int, ...]]):
    """The decision that saves the fewest bytes that any decision can."""

    name: ClassVar[str] = "least-decision"
    summary: ClassVar[str] = "the decision that saves the fewest bytes"

    def compute(self, state: State) -> tuple[int, ...]:
        lowered = state.lowered()
        return find_cut(state, lowered, [False] * len(lowered.problem), biased=False)
