"""The one way in which remat lets a solver decide, whatever the kind of problem."""

from __future__ import annotations

from typing import Any

from remat.solvers.ask import ask, check_question
from remat.solvers.ask import check_time_limit as check_time_limit
from remat.solvers.base import Solver
from remat.solvers.completion import by_knapsack
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.problem import KnapsackProblem, Problem, S


def run(solver: Solver, problem: Problem[S], *, time_limit: float | None = None) -> S:
    """Solve a problem with a solver and check the answer.

    The solver gets the problem as it is, so that what is refused is what it was given; solvers
    that want the easy part taken out derive from `remat.solvers.reduction.CoreSolver`. A graph problem
    becomes knapsacks for a solver that knows only those: see `remat.solvers.completion`.

    Args:
        solver: whom to ask.
        problem: what to solve, with its capacity.
        time_limit: seconds; None: the solver counts its work, or runs until it is done.

    Returns:
        The checked solution.

    Raises:
        ProblemError: an argument is not what it must be.
        BudgetError: nothing keeps to the capacity (the message has the least that is possible), or
            no schedule was found that does (it has the least peak that was).
        SolverError: the solver cannot run here, refuses the problem, raises, or answers wrongly.
    """
    check_question(solver, problem, time_limit)
    of_graph: Any = problem
    if (
        isinstance(problem, GraphProblem)
        and problem.kind not in solver.solves
        and KnapsackProblem.kind in solver.solves
    ):
        return by_knapsack(solver, of_graph, time_limit=time_limit)  # type: ignore[return-value]
    return ask(solver, problem, time_limit=time_limit)
