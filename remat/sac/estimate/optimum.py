"""The best operators of one module to store under a fraction of its memory, by any knapsack solver."""

from __future__ import annotations

import math

from remat.errors import BudgetError, ProblemError
from remat.sac.estimate.stats import Grouping, SACStats, group
from remat.solvers.auto import Auto
from remat.solvers.base import Solver
from remat.solvers.frontier import KnapsackFrontier, knapsack_frontier
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run


def as_knapsack(grouping: Grouping, capacity: int) -> KnapsackProblem:
    """The choice of what to store, as a knapsack over the free items: bytes against picoseconds."""
    return KnapsackProblem(
        weights=tuple(item.nbytes for item in grouping.free),
        values=tuple(item.runtime_ps for item in grouping.free),
        capacity=capacity,
    )


def optimal_checkpointing_policy(
    stats: SACStats, memory_budget: float, solver: Solver | None = None
) -> list[int]:
    """Which operators to store so that recomputing the others takes the least time.

    Args:
        stats: the operators of the module.
        memory_budget: share of the module's memory that may be stored, 0 to 1.
        solver: any knapsack solver; `remat.solvers.auto.Auto` where None.

    Returns:
        For each operator, 1 if it is stored and 0 if it is recomputed. What must be stored (see
        `remat.sac.estimate.stats.group`) is.

    Raises:
        ProblemError: the budget is not between 0 and 1, or the statistics do not fit together.
        BudgetError: what must be stored is more than the budget; the message says by how much.
        SolverError: as from `remat.solve`.
    """
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, (int, float)):
        raise ProblemError(f"memory_budget must be a number from 0 to 1, got {memory_budget!r}")
    if not 0 <= memory_budget <= 1:
        raise ProblemError(f"memory_budget must be from 0 to 1, got {memory_budget}")
    allowed = math.ceil(memory_budget * sum(stats.memory))
    return store_within(stats, group(stats), allowed, Auto() if solver is None else solver)


#: PyTorch's name for it.
get_optimal_checkpointing_policy_per_module = optimal_checkpointing_policy


def store_within(stats: SACStats, grouping: Grouping, nbytes: int, solver: Solver) -> list[int]:
    """As `optimal_checkpointing_policy`, with a budget in bytes and the groups found already."""
    least = sum(item.nbytes for item in grouping.stored)
    if least > nbytes:
        raise BudgetError(
            f"{nbytes} bytes may be stored, but {least} must be: operators that write to memory of "
            "the caller, and random ones where there is no input to compute them from again. Raise "
            f"the budget by {least - nbytes} bytes"
        )
    solution = run(solver, as_knapsack(grouping, nbytes - least))
    chosen = (*grouping.stored, *(grouping.free[i] for i in solution.saved))
    decided = [0] * len(stats)
    for item in chosen:
        for i in item.ops:
            decided[i] = 1
    return decided


def exact_frontier(stats: SACStats) -> KnapsackFrontier:
    """Every Pareto-optimal choice of free items: bytes stored against picoseconds not recomputed."""
    grouping = group(stats)
    return knapsack_frontier(as_knapsack(grouping, sum(i.nbytes for i in grouping.free)))
