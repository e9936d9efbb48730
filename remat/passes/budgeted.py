"""What passes share that decide under a memory budget: their options, and the limits they keep to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.errors import PlanError
from remat.graph.budget import Budget
from remat.graph.collection import without_collection
from remat.graph.costs import CostModel, Roofline
from remat.passes.analysis import Analysis
from remat.passes.base import Choice, Pass, Stage, State
from remat.passes.min_cut import MinCut, find_cut, require_tangents
from remat.solvers.base import Solver


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

    solver: Solver | None = None
    budget: Budget = Budget(share=1.0)
    cost: CostModel = Roofline()
    time_limit: float = 0.0

    @without_collection
    def limits(self, state: State) -> tuple[tuple[int, ...], Choice]:
        """What the runtime-optimal cut saves, and the bytes that a decision has to do with.

        Raises:
            PlanError: nothing is differentiated, or tags conflict.
            BudgetError: the budget is below the least possible.
        """
        require_tangents(state)
        cut = (state.cut or MinCut()).solve(state)
        size = state.lowered(self.cost).problem.size
        full = sum(size[i] for i in cut)
        least = sum(size[i] for i in least_decision(state))
        capacity = self.budget.capacity(full=max(full, least), least=least)
        return cut, Choice(capacity=capacity, full_bytes=full, least_bytes=least)

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
