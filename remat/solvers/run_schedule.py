"""The one way in which remat lets a solver decide a step problem, and the check of its answer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NoReturn

from remat.errors import BudgetError, ProblemError, SolverError
from remat.solvers.base import Solver, built_in
from remat.solvers.problem import as_integer
from remat.solvers.run import asking, check_question, noting
from remat.solvers.schedule_problem import (
    MOST_RUNS_PER_NODE,
    ScheduleProblem,
    evaluate_schedule,
    least_peak,
)
from remat.solvers.solution import Schedule, ScheduleAnswer, Status


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
            if isinstance(claim.sequence, Iterable):  # may be endless
                claim = ScheduleAnswer(
                    list(islice(claim.sequence, most + 1)), claim.bound, by_clock=claim.by_clock
                )
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


def verify_schedule(
    problem: ScheduleProblem, solver: Solver, claim: ScheduleAnswer, *, elapsed_s: float = 0.0
) -> Schedule:
    """Turn what a solver returned for a step problem into a schedule that can be relied on.

    Args:
        problem: what the solver was given.
        solver: who answered.
        claim: the answer.
        elapsed_s: seconds the solver took.

    Returns:
        The schedule. Its bound is that every node runs once, or a tighter one that one of our solvers
        claims; a tighter one from elsewhere becomes ``claimed_bound``.

    Raises:
        SolverError: the answer is malformed, cannot run, takes more bytes than there are, or claims
            what is not so; the message names the solver and the first thing wrong.
    """

    def refuse(fault: str) -> NoReturn:
        raise SolverError(solver.name, f"solver '{solver.name}' {fault}")

    sequence: list[Any] = claim.sequence  # type: ignore[assignment]
    if not isinstance(sequence, list):
        refuse(
            f"returned {type(claim.sequence).__name__} where nodes are due: return an iterable of nodes in "
            "the order in which they run, or ScheduleAnswer(sequence, bound)"
        )
    most = MOST_RUNS_PER_NODE * max(1, len(problem))
    if len(sequence) > most:
        refuse(f"returned more than {most} runs, {MOST_RUNS_PER_NODE} for each node")
    runs = []
    for position, item in enumerate(sequence):
        node = as_integer(item)
        if node is None:
            refuse(f"returned {item!r} as run {position}, where a node's number is due")
        runs.append(node)
    try:
        done = evaluate_schedule(problem, runs)
    except ProblemError as error:
        refuse(f"returned a schedule that cannot run: {error}")
    if problem.capacity is not None and done.peak_bytes > problem.capacity:
        refuse(
            f"returned a schedule with a peak of {done.peak_bytes} bytes at run {done.peak_at} "
            f"('{problem.names[runs[done.peak_at]]}'), {done.peak_bytes - problem.capacity} over the capacity of "
            f"{problem.capacity}"
        )
    once = sum(problem.cost)
    bound = claim.bound
    if bound is not None:
        bound = as_integer(bound)
        if bound is None:
            refuse(f"claims a bound of {claim.bound!r}, which is no integer: round it up")
        if bound > done.cost:
            refuse(
                f"claims that every schedule costs at least {bound}, but its own costs {done.cost}"
            )
    proven, claimed = once, None
    if bound is not None and bound > once:
        if built_in(solver):
            proven = bound
        else:
            claimed = bound
    return Schedule(
        sequence=tuple(runs),
        cost=done.cost,
        peak_bytes=done.peak_bytes,
        boundary=done.boundary,
        bound=proven,
        status=Status.OPTIMAL if proven == done.cost else Status.FEASIBLE,
        solver=solver.name,
        elapsed_s=elapsed_s,
        deterministic=solver.deterministic and not claim.by_clock,
        claimed_bound=claimed,
    )
