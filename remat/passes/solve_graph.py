"""The decision under a memory budget on the whole graph, by a solver of graph problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.passes.base import PassResult, State
from remat.passes.budgeted import Budgeted
from remat.solvers.run import run_graph


@dataclass(frozen=True)
class SolveGraph(Budgeted):
    """Keeps the saved bytes within a budget at the least cost that a solver finds on the graph.

    Where the runtime-optimal cut fits the budget, it decides: it knows what a fusing compiler
    recomputes for nothing. Below that the solver is given the graph problem itself.
    """

    name: ClassVar[str] = "solve-graph"
    summary: ClassVar[str] = "keep the saved bytes within a budget, on the whole graph"

    def run(self, state: State) -> PassResult:
        solver = self.asked()
        saved, choice = self.limits(state)
        capacity, lowered = choice.capacity or 0, state.lowered(self.cost)
        if (choice.full_bytes or 0) > capacity:
            solution = run_graph(
                solver,
                lowered.problem.within(capacity),
                time_limit=self.time_limit or None,
            )
            saved = solution.saved
            choice = replace(
                choice,
                solver=solver.name,
                items=len(lowered.problem),
                elapsed_s=solution.elapsed_s,
                deterministic=solution.deterministic,
                recompute_cost=solution.cost,
                recompute_bound=solution.bound,
            )
        nbytes = sum(lowered.problem.size[i] for i in saved)
        return PassResult(
            state=replace(state, decision=lowered.decision(saved), choice=choice),
            modified=True,
            detail=f"{nbytes} of {capacity} bytes saved, by {choice.solver}",
        )
