"""Solve problems with the compiled kernel, which is exact and, on most problems, the fastest solver.

The kernel computes in 64-bit integers.
"""

from __future__ import annotations

from typing import ClassVar

from remat.solvers.base import Solver
from remat.solvers.effort import EFFORT
from remat.solvers.kernel import missing, required
from remat.solvers.problem import KnapsackProblem
from remat.solvers.schedule.annealing import anneal
from remat.solvers.schedule.problem import ScheduleProblem
from remat.solvers.solution import Answer, ScheduleAnswer, Status

#: Largest sum of weights, and of values. Up to this sum, no product or shift in the kernel
#: overflows.
LARGEST_SUM = 2**60


class Native(Solver):
    """Solver in C++: knapsacks exactly by MINKNAP's expanding core, and schedule problems by annealing.

    Identical items are grouped, and weights and values are divided by their greatest common divisors. The *break item*
    is the first item in order of value per weight that no longer fits. The *core*, the items searched so far, grows
    around the break item, and upper bounds prune the choices (Pisinger 1997). For larger problems, one upper bound uses
    the capacity and the number of items together (after Martello, Pisinger, Toth 1999). Another upper bound uses the
    cost of capacity that no set of items can fill (a group relaxation, after Gomory 1969). Limits count work, so all
    runs give the same answer unless a time limit is set.
    """

    __slots__ = ()

    name: ClassVar[str] = "native"
    exact: ClassVar[bool] = True
    integer_limit: ClassVar[int | None] = LARGEST_SUM

    @classmethod
    def cannot_run(cls) -> str | None:
        return missing()

    def refuses(self, problem: KnapsackProblem) -> str | None:
        # `search` lowers the capacity to the total weight, so a larger capacity is no reason to refuse.
        return super().refuses(problem.within(min(problem.capacity, problem.total_weight)))

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> Answer:
        return self.search(
            problem, work=EFFORT.states, states=EFFORT.states_kept, time_limit=time_limit
        )

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> ScheduleAnswer:
        """Solve a schedule problem by simulated annealing; the schedule need not be optimal."""
        return anneal(problem, time_limit=time_limit)

    def search(
        self, problem: KnapsackProblem, *, work: int, states: int, time_limit: float | None = None
    ) -> Answer:
        """Solve a knapsack within limits on the number of states (partial choices of items).

        Args:
            problem: the knapsack.
            work: number of states that the search may create; `solve` passes `SolverEffort.states`.
            states: number of states that the search may keep at one time; `solve` passes
                `SolverEffort.states_kept`.
            time_limit: seconds; None: no clock.
        """
        saved, value, bound, optimal, by_clock = required().solve(
            problem.weights,
            problem.values,
            min(problem.capacity, problem.total_weight),
            0.0 if time_limit is None else time_limit,
            work,
            states,
        )
        return Answer(
            saved,
            bound,
            value=value,
            status=Status.OPTIMAL if optimal else Status.FEASIBLE,
            by_clock=by_clock,
        )
