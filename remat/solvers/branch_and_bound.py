"""OR-Tools' branch and bound for knapsacks, its ``knapsack_solver``.

It computes in 64-bit integers, but its bounds divide products that do not fit into them, so it computes
those in doubles, rounded to the nearest. That is safe as long as values stay well below 2**53.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.errors import ProblemError
from remat.solvers.bounds import relax
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import CoreSolver, reduce
from remat.solvers.solution import Answer

_VALUE_LIMIT = 2**50
_WEIGHT_LIMIT = 2**62 - 1


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BranchAndBound(CoreSolver):
    """OR-Tools' branch and bound: fast where values and weights are unrelated.

    Attributes:
        clock_s: where no time limit is given, seconds after which to stop. The engine counts no
            work, so an answer that was stopped says that a clock decided.
    """

    clock_s: float = 2.0

    name: ClassVar[str] = "branch-and-bound"
    requires: ClassVar[tuple[str, ...]] = ("ortools",)

    def __post_init__(self) -> None:
        if not self.clock_s > 0:
            raise ProblemError(f"clock_s must be above 0, got {self.clock_s}")

    def refuses(self, problem: KnapsackProblem) -> str | None:
        """Refuse sums with which its bounds could be wrong."""
        core = reduce(problem).core
        if core.total_value > _VALUE_LIMIT:
            return f"values sum to {core.total_value}, above the 2**50 up to which its bounds hold"
        if core.total_weight > _WEIGHT_LIMIT:
            return f"weights sum to {core.total_weight}, above the 2**62 - 1 that it can add up"
        return None

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Search until proven or out of time; the greedy answer is the floor."""
        from ortools.algorithms.python import knapsack_solver

        relaxed = relax(core)
        kind = knapsack_solver.SolverType.KNAPSACK_MULTIDIMENSION_BRANCH_AND_BOUND_SOLVER
        search = knapsack_solver.KnapsackSolver(kind, self.name)
        search.init(list(core.values), [list(core.weights)], [core.capacity])
        search.set_time_limit(self.clock_s if time_limit is None else time_limit)
        search.solve()
        saved = tuple(i for i in range(len(core)) if search.best_solution_contains(i))
        if search.is_solution_optimal():
            return Answer(saved, core.value_of(saved))
        if core.value_of(saved) < relaxed.value:
            saved = relaxed.saved
        return Answer(saved, relaxed.bound, by_clock=core.value_of(saved) < relaxed.bound)
