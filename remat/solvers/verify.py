"""Evaluate the answers of solvers in integers, and raise an error that names the solver of a wrong answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NoReturn

from remat.errors import ProblemError, SolverError
from remat.solvers.base import Solver, built_in, unavailable
from remat.solvers.columns import as_integer
from remat.solvers.effort import EFFORT
from remat.solvers.graph.lagrangian import Incumbent, Lagrangian, Search
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.knapsack.native import Native
from remat.solvers.problem import KnapsackProblem, Problem, S
from remat.solvers.solution import Answer, Status


def verify(problem: Problem[S], solver: Solver, answer: object) -> S:
    """Turn a solver's answer into a verified solution.

    The solution's bound is the bound of `Problem.limits`, or a tighter bound that a built-in solver claims. If a plugin
    claims a tighter bound for a knapsack or a graph problem, a short search tries to prove the claim. A claimed bound
    that remains unproven becomes the solution's ``claimed_bound``.

    Raises:
        SolverError: the answer is malformed, cannot be carried out, exceeds the capacity, or makes
            a false claim. The message names the solver and the first fault.
    """
    return judge(problem, solver, read(problem, solver, answer), elapsed_s=0.0)


def read(problem: Problem[Any], solver: Solver, answer: object) -> Answer:
    """Convert a solver's answer to an `Answer` of plain ints, without evaluating the answer.

    The chosen items, nodes or runs are in the answer's ``saved``, for schedule problems too. A malformed answer raises
    a `SolverError`.
    """
    # A bare iterable becomes an answer without claims.
    claim = answer if isinstance(answer, Answer) else Answer(answer)  # type: ignore[arg-type]
    if claim.status is not None and not isinstance(claim.status, Status):
        refuse(solver, f"returned {claim.status!r} as status: use Status.OPTIMAL or .FEASIBLE")
    if not isinstance(claim.saved, Iterable):
        refuse(
            solver,
            f"returned {type(claim.saved).__name__} where {problem.entry} indices are due: return an iterable of them, "
            "or Answer(saved, bound), or for a schedule problem ScheduleAnswer(sequence, bound)",
        )
    # Read at most one entry too many: that shows the mistake, and generators may be endless.
    entries = list(islice(claim.saved, problem.most_entries + 1))
    try:
        choice = problem.read(entries)
    except ProblemError as error:
        refuse(solver, str(error))
    return Answer(
        choice,
        bound=_number(solver, "bound", claim.bound),
        value=_number(solver, problem.objective, claim.value),
        status=claim.status,
        by_clock=bool(claim.by_clock),
    )


def judge(problem: Problem[S], solver: Solver, claim: Answer, *, elapsed_s: float) -> S:
    """Evaluate an answer that `read` returned, and check its claims; see `verify`."""
    try:
        figures = problem.measure(tuple(claim.saved))
    except ProblemError as error:
        refuse(solver, f"returned a {problem.noun} that cannot run: {error}")
    reached, nbytes = figures[problem.objective], figures[problem.bytes_taken]
    if problem.capacity is not None and nbytes > problem.capacity:
        refuse(
            solver,
            f"returned {problem.excess(figures)} over a capacity of {problem.capacity}, "
            f"{nbytes - problem.capacity} too much",
        )
    if claim.value is not None and claim.value != reached:
        refuse(
            solver,
            f"claims a {problem.objective} of {claim.value}, but its own {problem.noun} has {reached}",
        )
    bound = _claimed_bound(problem, solver, claim, reached)
    proven, reachable = problem.limits()
    tighter: Callable[[int, int], int] = min if problem.maximises else max
    if bound is not None:
        # A false bound may contradict a greedy choice that is better than the solver's own answer.
        for number, whose in ((reached, "its own"), (reachable, "a greedy")):
            if number is not None and tighter(bound, number) != number:
                beyond = "above" if problem.maximises else "below"
                refuse(
                    solver,
                    f"claims that no {problem.noun} has a {problem.objective} {beyond} {bound}, but {whose} "
                    f"{problem.noun} has {number}",
                )
        if tighter(bound, proven) != proven:
            sure = bound if built_in(solver) else _PROOFS[problem.kind](problem, reached)
            proven = tighter(proven, sure)
    solution: Any = problem.solution
    return solution(  # type: ignore[no-any-return]
        **figures,
        bound=proven,
        status=Status.OPTIMAL if proven == reached else Status.FEASIBLE,
        solver=solver.name,
        elapsed_s=elapsed_s,
        deterministic=solver.deterministic and not claim.by_clock,
        claimed_bound=None if bound is None or tighter(bound, proven) == proven else bound,
    )


def _claimed_bound(
    problem: Problem[Any], solver: Solver, claim: Answer, reached: int
) -> int | None:
    """Return an answer's claimed bound, or its own value or cost if it claims to be optimal; None without a claim."""
    knapsack = isinstance(problem, KnapsackProblem)
    exact = knapsack and solver.exact
    if claim.status is None:
        return reached if exact and claim.bound is None else claim.bound
    if claim.status is Status.FEASIBLE:
        return claim.bound
    if claim.bound is not None and claim.bound != reached:
        refuse(solver, f"claims OPTIMAL at {reached} and, with it, a bound of {claim.bound}")
    if claim.bound is None and knapsack and not exact:
        refuse(
            solver,
            "claims OPTIMAL without a bound and without declaring exact = True: "
            "return Answer(saved, bound) with the bound that proves it",
        )
    return reached


def _proven_value(problem: KnapsackProblem, reached: int) -> int:
    """Prove an upper bound on every choice's value by a short search; without the kernel, return the total value."""
    native = Native()
    if native.cannot_run() is not None or native.refuses(problem) is not None:
        return problem.total_value
    bound = native.search(problem, work=EFFORT.verify_work, states=EFFORT.verify_states).bound
    return problem.total_value if bound is None else bound


def _proven_cost(problem: GraphProblem, reached: int) -> int:
    """Return a lower bound on every decision's cost, proven by a short search and at most ``reached``."""
    if unavailable(Lagrangian) is not None:
        return 0
    search = Search(problem)
    incumbent = Incumbent(saved=(), cost=reached, bound=min(reached, search.start().bound))
    return search.exact(incumbent, work=EFFORT.verify_work, tolerance=0.0).bound


#: By kind of problem, a function that proves a bound quickly. Its arguments are the problem, and the
#: value or cost that the solver's answer reaches.
_PROOFS: Mapping[str, Callable[[Any, int], int]] = {
    "knapsack": _proven_value,
    "graph": _proven_cost,
    "schedule": lambda problem, _: problem.limits().bound,  # no short search proves more
}


def _number(solver: Solver, quantity: str, claimed: object) -> int | None:
    if claimed is None:
        return None
    number = as_integer(claimed)
    if number is None:
        refuse(
            solver, f"claims a {quantity} of {claimed!r}, which is no integer: round it, bounds up"
        )
    return number


def refuse(solver: Solver, fault: str) -> NoReturn:
    """Raise a `SolverError` that names the solver and the fault of its answer."""
    raise SolverError(solver.name, f"solver '{solver.name}' {fault}")
