"""The one way in which remat lets a solver decide a problem with ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from remat.errors import ProblemError, SolverError
from remat.solvers.base import Solver, built_in
from remat.solvers.problem import as_integer
from remat.solvers.run import asking, check_question, noting
from remat.solvers.schedule_problem import MOST_RUNS_PER_NODE
from remat.solvers.solution import Status, WaysAnswer, WaysSchedule
from remat.solvers.verify import number_of, refuse
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
            most = MOST_RUNS_PER_NODE * max(1, len(problem.step))
            runs: Any = answer.sequence
            if isinstance(runs, Iterable):  # may be endless
                runs = list(islice(runs, most + 1))
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
    runs = _integers(solver, given, "run", MOST_RUNS_PER_NODE * max(1, len(step)))
    if not isinstance(claim.ways, Mapping):
        refuse(solver, f"returned ways of type {type(claim.ways).__name__}, where a mapping is due")
    nodes = _integers(solver, list(claim.ways), "node with a way", len(step))
    which = _integers(solver, list(claim.ways.values()), "way", len(step))
    boundary = number_of(solver, "boundary", claim.boundary)
    try:
        followed = follow(problem, runs, boundary)
        ways = {v: way for v, way in zip(nodes, which, strict=True) if v in followed.idle}
        done = evaluate_ways(problem, followed, ways, step.capacity)
    except ProblemError as error:
        refuse(solver, f"returned a schedule that cannot run: {error}")
    if step.capacity is not None and done.peak_bytes > step.capacity:
        refuse(
            solver,
            f"returned a schedule with a peak of {done.peak_bytes} bytes, {done.peak_bytes - step.capacity} over "
            f"the capacity of {step.capacity}",
        )
    bound = number_of(solver, "bound", claim.bound)
    if bound is not None and bound > done.cost:
        refuse(
            solver,
            f"claims that every schedule costs at least {bound}, but its own costs {done.cost}",
        )
    proven = bound if bound is not None and built_in(solver) else 0
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
        claimed_bound=bound if bound and not built_in(solver) else None,
    )


def _integers(solver: Solver, given: object, what: str, most: int) -> list[int]:
    if not isinstance(given, list):
        refuse(solver, f"returned {type(given).__name__}, where the numbers of nodes are due")
    if len(given) > most:
        refuse(solver, f"returned more than {most} times a {what}")
    numbers = []
    for position, item in enumerate(given):
        number = as_integer(item)
        if number is None:
            refuse(solver, f"returned {item!r} as {what} {position}, where a number is due")
        numbers.append(number)
    return numbers
