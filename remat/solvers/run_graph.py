"""The one way in which remat lets a solver decide a graph problem."""

from __future__ import annotations

from remat.solvers.base import Solver
from remat.solvers.completion import by_knapsack
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.run import asking, check_question, drawn, noting
from remat.solvers.solution import GraphSolution
from remat.solvers.verify import verify_graph


def run_graph(
    solver: Solver, problem: GraphProblem, *, time_limit: float | None = None
) -> GraphSolution:
    """Solve a graph problem with a solver and check the answer.

    A solver that knows knapsacks only gets one: see `remat.solvers.completion`.

    Args:
        solver: whom to ask.
        problem: what to solve, with its capacity.
        time_limit: seconds; None: the solver counts its work, or runs until it is done.

    Returns:
        The checked solution.

    Raises:
        ProblemError: an argument is not what it must be, or no decision keeps to the capacity.
        SolverError: the solver cannot run here, refuses the problem, raises, or answers wrongly.
    """
    check_question(solver, problem, GraphProblem, time_limit)
    if not solver.graph:
        return by_knapsack(solver, problem, time_limit=time_limit)

    with noting(problem):
        with asking(solver) as elapsed:
            answer = drawn(solver.solve_graph(problem, time_limit=time_limit), len(problem))
            elapsed_s = elapsed()
        return verify_graph(problem, solver, answer, elapsed_s=elapsed_s)
