"""The decision under a memory budget on the whole graph, by a solver of graph problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import PlanError
from remat.graph.budget import Budget
from remat.graph.costs import CostModel, Roofline
from remat.passes.base import Choice, Pass, PassResult, Stage, State
from remat.passes.knapsack import Knapsack
from remat.passes.min_cut import MinCut, require_tangents
from remat.solvers.base import Solver
from remat.solvers.run import run_graph


@dataclass(frozen=True)
class SolveGraph(Pass):
    """Keeps the saved bytes within a budget at the least cost that a solver finds on the graph.

    Where the runtime-optimal cut fits the budget, it decides: it knows what a fusing compiler
    recomputes for nothing. Below that the solver is given the graph problem itself.

    Attributes:
        solver: who solves it; handed over by whoever composes the pipeline.
        budget: the budget, as `remat.plan` reads it.
        cost: the cost model.
        time_limit: seconds for the solver; no clock where 0.
    """

    name: ClassVar[str] = "solve-graph"
    stage: ClassVar[Stage] = Stage.DECIDE
    summary: ClassVar[str] = "keep the saved bytes within a budget, on the whole graph"

    solver: Solver | None = None
    budget: Budget = Budget(share=1.0)
    cost: CostModel = Roofline()
    time_limit: float = 0.0

    def run(self, state: State) -> PassResult:
        require_tangents(state)
        if self.solver is None:
            raise PlanError(
                "the solve-graph pass was given no solver; hand it one, for example "
                "SolveGraph(solver=remat.plugins.registry().solver('auto'), budget=...)"
            )
        cut = (state.cut or MinCut()).solve(state)
        lowered = state.lowered(self.cost)
        size = lowered.problem.size
        full = sum(size[i] for i in cut)
        least = sum(size[i] for i in Knapsack.least(state))
        capacity = self.budget.capacity(full=max(full, least), least=least)
        choice = Choice(capacity=capacity, full_bytes=full, least_bytes=least)
        saved = cut
        if full > capacity:
            solution = run_graph(
                self.solver,
                lowered.problem.within(capacity),
                time_limit=self.time_limit or None,
            )
            saved = solution.saved
            choice = replace(
                choice,
                solver=self.solver.name,
                items=len(lowered.problem),
                elapsed_s=solution.elapsed_s,
                deterministic=solution.deterministic,
                recompute_cost=solution.cost,
                recompute_bound=solution.bound,
            )
        nbytes = sum(size[i] for i in saved)
        return PassResult(
            state=replace(state, decision=lowered.decision(saved), choice=choice),
            modified=True,
            detail=f"{nbytes} of {capacity} bytes saved, by {choice.solver}",
        )
