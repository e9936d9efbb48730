"""The one way in which remat lets a solver decide a step problem."""

from __future__ import annotations

from dataclasses import replace

from remat.errors import BudgetError, SolverError
from remat.solvers.base import Solver
from remat.solvers.run import asking, check_question, drawn, noting
from remat.solvers.schedule_problem import MOST_RUNS_PER_NODE, ScheduleProblem, least_peak
from remat.solvers.solution import Schedule, ScheduleAnswer
from remat.solvers.verify import verify_schedule


def run_schedule(
    solver: Solver, problem: ScheduleProblem, *, time_limit: float | None = None
) -> Schedule:
    """Solve a step problem with a solver and check the answer.

    Args:
        solver: whom to ask.
        problem: what to solve, with its capacity.
        time_limit: seconds; None: the solver counts its work, or runs until it is done.

    Returns:
        The checked schedule.

    Raises:
        ProblemError: an argument is not what it must be.
        BudgetError: no schedule keeps to the capacity (the message has the bound that proves it), or
            none was found (it has the least peak that was).
        SolverError: the solver cannot run here, refuses the problem, raises, or answers wrongly.
    """
    check_question(solver, problem, ScheduleProblem, time_limit)
    if not solver.schedule:
        raise SolverError(solver.name, f"solver '{solver.name}' does not solve the step problem")
    refuse_infeasible(problem)
    with noting(problem):
        with asking(solver) as elapsed:
            answer = solver.solve_schedule(problem, time_limit=time_limit)
            claim = answer if isinstance(answer, ScheduleAnswer) else ScheduleAnswer(answer)
            most = MOST_RUNS_PER_NODE * max(1, len(problem))
            claim = replace(claim, sequence=drawn(claim.sequence, most))  # type: ignore[arg-type]
            elapsed_s = elapsed()
        return verify_schedule(problem, solver, claim, elapsed_s=elapsed_s)


def refuse_infeasible(problem: ScheduleProblem) -> None:
    """Raises a `BudgetError` where it is proven that no schedule keeps to the capacity."""
    if problem.capacity is None:
        return
    least, node = least_peak(problem)
    if least > problem.capacity:
        if node < 0:
            why = "what stays to the end takes that much"
        else:
            why = f"'{problem.names[node]}' alone takes that much with what it reads and makes"
        raise BudgetError(
            f"no schedule keeps to a peak of {problem.capacity} bytes; every one has at least {least}: "
            f"{why}. Raise the capacity"
        )
