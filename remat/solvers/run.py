"""Run a solver on any kind of problem, and verify the answer."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

from remat.errors import BudgetError, ProblemError, RefusalError, SolverError
from remat.solvers.base import Solver, unavailable
from remat.solvers.graph.completion import by_knapsack
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.problem import KnapsackProblem, Problem, S
from remat.solvers.verify import judge, read, refuse

#: Time limits of this many seconds or more are refused like infinite ones: a clock in floats cannot
#: add them exactly.
_LONGEST = 10.0**15


def run(
    solver: Solver,
    problem: Problem[S],
    *,
    time_limit: float | None = None,
    knapsack: bool = False,
) -> S:
    """Solve a problem with a solver, and verify the answer.

    The caller's problem is passed on unchanged, so numbers in a solver's refusal are the caller's numbers.
    If a solver solves only knapsacks, a graph problem is converted to knapsacks: see
    `remat.solvers.graph.completion`.

    Args:
        solver: the solver to run.
        problem: the problem to solve, with its capacity.
        time_limit: seconds after which the solver stops; None: the solver limits its work, or
            runs until it is done.
        knapsack: whether to convert a graph problem to knapsacks even if the solver has
            ``solve_graph``.

    Raises:
        ProblemError: an argument is invalid.
        BudgetError: every answer exceeds the capacity; the message has the least possible bytes. For
            a schedule problem also: no schedule within the capacity was found; the message has the
            lowest peak found.
        SolverError: the solver cannot run here, refuses the problem, raises, or returns a wrong
            answer.
    """
    _check_question(solver, problem, time_limit)
    if isinstance(problem, GraphProblem) and (
        knapsack or ("graph" not in solver.solves and "knapsack" in solver.solves)
    ):
        pick = partial(run, solver, time_limit=time_limit)
        return by_knapsack(solver, problem, pick)  # type: ignore[return-value]
    if problem.kind not in solver.solves:
        others = " and ".join(sorted(solver.solves)) or "no"
        refuse(solver, f"does not solve {problem.kind} problems, only {others} problems")
    problem.refuse_infeasible()
    try:
        if isinstance(problem, KnapsackProblem):
            with solver_errors(solver):
                reason = solver.refuses(problem)
            if reason is not None:
                raise RefusalError(
                    solver.name, f"solver '{solver.name}' refuses the problem: {reason}"
                )
        given = _contents(problem)
        with solver_errors(solver) as elapsed:
            answer = getattr(solver, problem.method)(problem, time_limit=time_limit)
            claim = read(problem, solver, answer)  # timed too: generators work here
            elapsed_s = elapsed()
        if given != _contents(problem):
            refuse(solver, "changed the problem it was given")
        return judge(problem, solver, claim, elapsed_s=elapsed_s)
    except SolverError as error:
        if error.problem is None:
            error.problem = problem  # for crash reports
        raise


def _check_question(solver: object, problem: object, time_limit: object) -> None:
    """Check the arguments of `run`, and that the solver can run."""
    if not isinstance(solver, Solver):
        raise ProblemError(f"solver must be an instance of remat.Solver, got {solver!r}")
    if not isinstance(problem, Problem):
        raise ProblemError(
            "problem must be a KnapsackProblem, a GraphProblem or a ScheduleProblem, got "
            f"{type(problem).__name__}"
        )
    check_time_limit(time_limit)
    reason = unavailable(type(solver))
    if reason is not None:
        raise SolverError(solver.name, f"solver '{solver.name}' is not available: {reason}")


def check_time_limit(time_limit: object) -> None:
    """Raise `ProblemError` unless ``time_limit`` is None or a positive, finite number."""
    if time_limit is None:
        return
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)):
        raise ProblemError(f"time_limit must be seconds or None, got {time_limit!r}")
    if not 0 < time_limit < _LONGEST:
        raise ProblemError(
            f"time_limit must be above 0 and finite, got {time_limit!r}: give None for no limit"
        )


@contextlib.contextmanager
def solver_errors(solver: Solver) -> Iterator[Callable[[], float]]:
    """Convert exceptions in a ``with`` block to a `SolverError` that names the solver.

    A `BudgetError` passes unchanged, and so does a `SolverError` that already names the solver. The value of
    the context manager is a function that returns the seconds since the block began.
    """
    started = time.perf_counter()
    try:
        yield lambda: time.perf_counter() - started
    except BudgetError:  # not a fault of the solver: no answer fits
        raise
    except (Exception, SystemExit) as error:  # plugins may raise anything, even exit
        if isinstance(error, SolverError) and error.solver == solver.name:
            raise  # the solver's own message, such as how its process died
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise SolverError(
            solver.name,
            f"solver '{solver.name}' raised {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno})",
        ) from error


def _contents(problem: Problem[Any]) -> tuple[object, ...]:
    return tuple(getattr(problem, f.name) for f in fields(problem))  # type: ignore[arg-type]
