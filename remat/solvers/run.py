"""The one way in which remat runs a solver: ask whether it can, run it, check its answer."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from remat.errors import BudgetError, ProblemError, SolverError
from remat.solvers.base import Solver, unavailable
from remat.solvers.problem import KnapsackProblem
from remat.solvers.solution import Answer, Solution
from remat.solvers.verify import verify


def run(solver: Solver, problem: KnapsackProblem, *, time_limit: float | None = None) -> Solution:
    """Solve a problem with a solver and check the answer.

    The solver gets the problem as it is, so that what is refused is what it was given; solvers
    that want the easy part taken out derive from `remat.solvers.reduction.CoreSolver`.

    Args:
        solver: whom to ask.
        problem: what to solve.
        time_limit: seconds; None: the solver counts its work, or runs until it is done.

    Returns:
        The checked solution.

    Raises:
        ProblemError: an argument is not what it must be.
        SolverError: the solver cannot run here, refuses the problem, raises, or answers wrongly.
    """
    check_question(solver, problem, KnapsackProblem, time_limit)
    if not solver.knapsack:
        what = "graph" if solver.graph else "step"
        raise SolverError(
            solver.name, f"solver '{solver.name}' solves the {what} problem only, not knapsacks"
        )
    given = (problem.weights, problem.values, problem.capacity)
    with noting(problem), asking(solver):
        reason = solver.refuses(problem)
    if reason is not None:
        raise SolverError(solver.name, f"solver '{solver.name}' refuses the problem: {reason}")
    with noting(problem):
        with asking(solver) as elapsed:
            answer = drawn(solver.solve(problem, time_limit=time_limit), len(problem))
            elapsed_s = elapsed()
        if given != (problem.weights, problem.values, problem.capacity):
            raise SolverError(
                solver.name, f"solver '{solver.name}' changed the problem it was given"
            )
        return verify(problem, solver, answer, elapsed_s=elapsed_s)


def check_question(solver: object, problem: object, kind: type[object], time_limit: object) -> None:
    """Check what `run` and `remat.solvers.run_graph.run_graph` are given, and that the solver can run.

    Raises:
        ProblemError: an argument is not what it must be.
        SolverError: the solver cannot run here.
    """
    if not isinstance(solver, Solver):
        raise ProblemError(f"solver must be an instance of remat.Solver, got {solver!r}")
    if not isinstance(problem, kind):
        raise ProblemError(f"problem must be a {kind.__name__}, got {type(problem).__name__}")
    check_time_limit(time_limit)
    reason = unavailable(type(solver))
    if reason is not None:
        raise SolverError(solver.name, f"solver '{solver.name}' is not available: {reason}")


@contextlib.contextmanager
def noting(problem: object) -> Iterator[None]:
    """Notes the problem on solver errors, for crash reports."""
    try:
        yield
    except SolverError as error:
        if error.problem is None:
            error.problem = problem
        raise


@contextlib.contextmanager
def asking(solver: Solver) -> Iterator[Callable[[], float]]:
    """Runs a solver: whatever it raises names it. Gives the seconds that have gone by since."""
    started = time.perf_counter()
    try:
        yield lambda: time.perf_counter() - started
    except SolverError as error:
        if error.solver == solver.name:  # its own account, such as why its process died
            raise
        raise _raised(solver, error) from error
    except BudgetError:
        raise
    except (Exception, SystemExit) as error:  # the plugin border: anything may come out of it
        raise _raised(solver, error) from error


#: Seconds beyond which a limit is none: clocks count in floats.
_LONGEST = 10.0**15


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


def _raised(solver: Solver, error: BaseException) -> SolverError:
    return SolverError(
        solver.name, f"solver '{solver.name}' raised {type(error).__name__}: {error}"
    )


def drawn(answer: object, count: int) -> object:
    """The answer with its indices drawn from a lazy iterable: one too many at most, as some never end."""
    if isinstance(answer, Answer):
        saved = drawn(answer.saved, count)
        return dataclasses.replace(answer, saved=saved)  # type: ignore[arg-type]
    return list(islice(answer, count + 1)) if isinstance(answer, Iterable) else answer
