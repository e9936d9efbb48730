"""The one way in which remat lets a solver decide a problem with ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from remat.errors import ProblemError, SolverError
from remat.solvers.base import Solver
from remat.solvers.problem import as_integer
from remat.solvers.run import asking, check_question, drawn, noting
from remat.solvers.schedule_problem import MOST_RUNS_PER_NODE
from remat.solvers.solution import Status, WaysAnswer, WaysSchedule
from remat.solvers.verify import bounds_of, number_of, refuse, runs_of
from remat.solvers.ways_problem import WaysProblem, evaluate_ways, follow


def run_ways(
    solver: Solver, problem: WaysProblem, *, time_limit: float | None = None
) -> WaysSchedule:
    """Solve a problem with ways with a solver and check the answer.

    Args:
        solver: whom to ask.
        problem: what to solve, with its capacity.
        time_limit: seconds; None: the solver counts its work, or runs until it is done.

    Returns:
        The checked schedule and its ways.

    Raises:
        ProblemError: an argument is not what it must be.
        BudgetError: none within the capacity was found.
        SolverError: the solver cannot run here, raises, or answers wrongly.
    """
    check_question(solver, problem, WaysProblem, time_limit)
    if not solver.ways:
        raise SolverError(solver.name, f"solver '{solver.name}' does not solve problems with ways")
    with noting(problem):
        with asking(solver) as elapsed:
            answer: object = solver.solve_ways(problem, time_limit=time_limit)
            if not isinstance(answer, WaysAnswer):
                refuse(
                    solver,
                    f"returned {type(answer).__name__}: return WaysAnswer(sequence, ways)",
                )
            runs = drawn(answer.sequence, MOST_RUNS_PER_NODE * max(1, len(problem.step)))
            if isinstance(answer.ways, Mapping):
                answer = replace(answer, ways=dict(answer.ways.items()))
            elapsed_s = elapsed()
        return _verified(problem, solver, answer, runs, elapsed_s)


def _verified(
    problem: WaysProblem, solver: Solver, claim: WaysAnswer, given: object, elapsed_s: float
) -> WaysSchedule:
    """The answer, recomputed in integers.

    Raises:
        SolverError: it is malformed, cannot run, takes more bytes than there are, or claims what is not so.
    """
    step = problem.step
    if not isinstance(given, list):
        refuse(solver, f"returned {type(given).__name__}, where the numbers of nodes are due")
    runs = runs_of(solver, given, len(step))
    if not isinstance(claim.ways, Mapping):
        refuse(solver, f"returned ways of type {type(claim.ways).__name__}, where a mapping is due")
    asked: dict[int, int] = {}
    for node, way in claim.ways.items():
        pair = as_integer(node), as_integer(way)
        if pair[0] is None or pair[1] is None:
            refuse(solver, f"returned the way {way!r} for node {node!r}, where numbers are due")
        if not 0 <= pair[0] < len(step):
            refuse(
                solver, f"returned a way for node {pair[0]}, but the nodes are 0 to {len(step) - 1}"
            )
        asked[pair[0]] = pair[1]
    boundary = number_of(solver, "boundary", claim.boundary)
    try:
        followed = follow(problem, runs, boundary)
        ways = {v: way for v, way in asked.items() if v in followed.idle}
        done = evaluate_ways(problem, followed, ways, step.capacity)
    except ProblemError as error:
        refuse(solver, f"returned a schedule that cannot run: {error}")
    if step.capacity is not None and done.peak_bytes > step.capacity:
        refuse(
            solver,
            f"returned a schedule with a peak of {done.peak_bytes} bytes, {done.peak_bytes - step.capacity} over "
            f"the capacity of {step.capacity}",
        )
    proven, claimed = bounds_of(solver, claim.bound, 0, done.cost)
    return WaysSchedule(
        sequence=tuple(runs),
        ways=ways,
        cost=done.cost,
        waited=done.waited,
        peak_bytes=done.peak_bytes,
        boundary=followed.done.boundary,
        bound=proven,
        status=Status.OPTIMAL if proven == done.cost else Status.FEASIBLE,
        solver=solver.name,
        elapsed_s=elapsed_s,
        deterministic=solver.deterministic and not claim.by_clock,
        claimed_bound=claimed,
    )
