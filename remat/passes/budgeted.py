"""What passes share that decide under a memory budget: their options, and the limits they keep to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.errors import BudgetError, PlanError
from remat.graph.budget import Budget
from remat.graph.collection import without_collection
from remat.graph.costs import CostModel, Roofline
from remat.graph.region_budgets import region_budget
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
            BudgetError: the budget is below the least possible, or does not go together with what
                the code sets for its regions.
        """
        require_tangents(state)
        cut = (state.cut or MinCut()).solve(state)
        size = state.lowered(self.cost).problem.size
        full = sum(size[i] for i in cut)
        least = sum(size[i] for i in least_decision(state))
        own = state.get(RegionBudget()) if state.heeds_regions else None
        return cut, Choice(
            capacity=capacity_under(self.budget, own, full=max(full, least), least=least),
            full_bytes=full,
            least_bytes=least,
            region_budget=own,
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


def capacity_under(budget: Budget, own: float | None, *, full: int, least: int) -> int:
    """The bytes that one graph may save.

    Args:
        budget: the budget that was asked for.
        own: the share that the code sets for its region. It holds instead of a share; bytes hold
            as well.
        full: bytes that the runtime-optimal partition saves.
        least: the least that any plan saves.

    Raises:
        BudgetError: a byte budget below ``least``, or a peak where the code sets a share.
    """
    if own is None:
        return budget.capacity(full=full, least=least)
    allowed = Budget(share=own).capacity(full=full, least=least)
    refuse_peak(budget, own)
    return (
        allowed if budget.nbytes is None else min(allowed, budget.capacity(full=full, least=least))
    )


def refuse_peak(budget: Budget, own: float | None) -> None:
    """Refuses a budget on the peak where the code sets a share for its region.

    Raises:
        BudgetError: both are set.
    """
    if budget.peak_bytes is not None and own is not None:
        raise BudgetError(
            f"budget is {budget.label}, but the code sets {own!r} for its region by "
            "torch.autograd.graph.region_activation_memory_budget, a share of the saved bytes; "
            "take the context out, or give the budget as a share or in bytes"
        )


@dataclass(frozen=True)
class RegionBudget(Analysis[float | None]):
    """The share that the code itself sets for the graph; None where it sets none."""

    name: ClassVar[str] = "region-budget"
    summary: ClassVar[str] = "the budget that the code sets for its region"

    def compute(self, state: State) -> float | None:
        return region_budget(state.joint, state.index, state.roles)


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
