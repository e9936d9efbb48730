"""The check that every answer passes: recomputed in integers, refused with the solver's name."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import islice, pairwise
from typing import Any, NoReturn

from remat.errors import ProblemError, SolverError
from remat.solvers.base import Solver, built_in, unavailable
from remat.solvers.bounds import relax
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.lagrangian import Found, Lagrangian, Search
from remat.solvers.native import Native
from remat.solvers.problem import KnapsackProblem, as_integer
from remat.solvers.schedule_problem import (
    MOST_RUNS_PER_NODE,
    ScheduleProblem,
    evaluate_schedule,
)
from remat.solvers.solution import (
    Answer,
    GraphSolution,
    Schedule,
    ScheduleAnswer,
    Solution,
    Status,
)

#: Limits for checking a bound that a solver from outside claims: work of either kernel, and states of
#: the knapsack's. Some hundredths of a second; enough for nearly all problems of a few hundred items.
_WORK = 2_000_000
_STATES = 50_000


def verify(
    problem: KnapsackProblem, solver: Solver, answer: object, *, elapsed_s: float = 0.0
) -> Solution:
    """Turn what a solver returned into a solution that can be relied on.

    Args:
        problem: what the solver was given.
        solver: who answered.
        answer: an iterable of indices, or an `Answer`.
        elapsed_s: seconds the solver took.

    Returns:
        The solution. Its bound is that of the linear relaxation, or a tighter one that one of our
        solvers claims. A tighter one from elsewhere is checked by a short search; what that does not
        prove becomes the solution's ``claimed_bound``.

    Raises:
        SolverError: the answer is malformed, overweight, or claims what is not so; the message
            names the solver and the first thing wrong.
    """
    claim, saved = _read(problem, solver, answer, "item")
    weight, value = problem.weight_of(saved), problem.value_of(saved)
    if weight > problem.capacity:
        refuse(
            solver,
            f"returned an overweight choice: {weight} over a capacity of {problem.capacity}, "
            f"{weight - problem.capacity} too much",
        )
    claimed = number_of(solver, "value", claim.value)
    if claimed is not None and claimed != value:
        refuse(solver, f"claims a value of {claimed}, but its items are worth {value}")

    relaxed = relax(problem)
    bound = _bound(solver, claim, value)
    if claim.status is Status.OPTIMAL and claim.bound is None and not solver.exact:
        refuse(
            solver,
            "claims OPTIMAL without a bound and without declaring exact = True: "
            "return Answer(saved, bound) with the bound that proves it",
        )
    if claim.status is None and bound is None and solver.exact:
        bound = value
    if bound is not None and bound < max(value, relaxed.value):
        known = "its own items are" if bound < value else "a greedy choice is"
        refuse(
            solver,
            f"claims that no choice is worth more than {bound}, but {known} worth "
            f"{max(value, relaxed.value)}",
        )
    proven, claimed = relaxed.bound, None
    if bound is not None and bound < proven:
        proven = bound if built_in(solver) else min(proven, _proven_value(problem))
        claimed = bound if bound < proven else None
    return Solution(
        saved=saved,
        value=value,
        weight=weight,
        bound=proven,
        status=Status.OPTIMAL if proven == value else Status.FEASIBLE,
        solver=solver.name,
        elapsed_s=elapsed_s,
        deterministic=solver.deterministic and not claim.by_clock,
        claimed_bound=claimed,
    )


def verify_graph(
    problem: GraphProblem, solver: Solver, answer: object, *, elapsed_s: float = 0.0
) -> GraphSolution:
    """Turn what a solver returned for a graph problem into a solution that can be relied on.

    Args:
        problem: what the solver was given.
        solver: who answered.
        answer: an iterable of node positions, or an `Answer`.
        elapsed_s: seconds the solver took.

    Returns:
        The solution. Its bound is what one of our solvers claims; a claim from elsewhere is checked
        as by `verify`.

    Raises:
        SolverError: the answer is malformed, cannot run, takes more bytes than there are, or claims
            what is not so; the message names the solver and the first thing wrong.
    """
    claim, saved = _read(problem, solver, answer, "node")
    try:
        done = evaluate(problem, saved)
    except ProblemError as error:
        refuse(solver, f"returned a decision that cannot run: {error}")
    if problem.capacity is not None and done.saved_bytes > problem.capacity:
        refuse(
            solver,
            f"returned an overweight decision: {done.saved_bytes} bytes over a capacity of "
            f"{problem.capacity}, {done.saved_bytes - problem.capacity} too much",
        )
    cost = done.recompute_cost
    claimed = number_of(solver, "cost", claim.value)
    if claimed is not None and claimed != cost:
        refuse(solver, f"claims a cost of {claimed}, but its decision costs {cost}")
    bound = _bound(solver, claim, cost)
    if bound is not None and bound > cost:
        refuse(
            solver,
            f"claims that every decision costs at least {bound}, but its own costs {cost}",
        )
    proven = claimed = max(0, bound or 0)
    if proven > 0 and not built_in(solver):
        proven = _proven_cost(problem, cost)
    return GraphSolution(
        saved=done.saved,
        cost=cost,
        saved_bytes=done.saved_bytes,
        bound=proven,
        status=Status.OPTIMAL if proven == cost else Status.FEASIBLE,
        solver=solver.name,
        elapsed_s=elapsed_s,
        deterministic=solver.deterministic and not claim.by_clock,
        claimed_bound=claimed if claimed > proven else None,
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
    if not isinstance(claim.sequence, list):
        refuse(
            solver,
            f"returned {type(claim.sequence).__name__} where nodes are due: return an iterable of nodes in "
            "the order in which they run, or ScheduleAnswer(sequence, bound)",
        )
    runs = runs_of(solver, claim.sequence, len(problem))
    try:
        done = evaluate_schedule(problem, runs)
    except ProblemError as error:
        refuse(solver, f"returned a schedule that cannot run: {error}")
    if problem.capacity is not None and done.peak_bytes > problem.capacity:
        refuse(
            solver,
            f"returned a schedule with a peak of {done.peak_bytes} bytes at run {done.peak_at} "
            f"('{problem.names[runs[done.peak_at]]}'), {done.peak_bytes - problem.capacity} over the capacity of "
            f"{problem.capacity}",
        )
    proven, claimed = bounds_of(solver, claim.bound, sum(problem.cost), done.cost)
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


def _proven_value(problem: KnapsackProblem) -> int:
    """An upper bound on the value of any choice, by a short search of the kernel."""
    native = Native()
    if native.cannot_run() is not None or native.refuses(problem) is not None:
        return problem.total_value
    bound = native.search(problem, work=_WORK, states=_STATES).bound
    return problem.total_value if bound is None else bound


def _proven_cost(problem: GraphProblem, cost: int) -> int:
    """A lower bound on the cost of any decision, by a short search; at most ``cost``."""
    if unavailable(Lagrangian) is not None:
        return 0
    search = Search(problem)
    known = Found(saved=(), cost=cost, bound=min(cost, search.start().bound))
    return search.exact(known, work=_WORK, tolerance=0.0).bound


def _read(
    problem: Sized, solver: Solver, answer: object, what: str
) -> tuple[Answer, tuple[int, ...]]:
    """The answer and its indices, sorted, each a valid one."""
    claim = answer if isinstance(answer, Answer) else Answer(answer)  # type: ignore[arg-type]
    if claim.status is not None and not isinstance(claim.status, Status):
        refuse(solver, f"returned {claim.status!r} as status: use Status.OPTIMAL or .FEASIBLE")
    if not isinstance(claim.saved, Iterable):
        refuse(
            solver,
            f"returned {type(claim.saved).__name__} where indices are due: "
            f"return an iterable of {what} indices, or Answer(saved, bound)",
        )
    count, saved = len(problem), []
    article = "an" if what == "item" else "a"
    items: list[Any] = list(islice(claim.saved, count + 1))  # a generator may be endless
    if items and set(map(type, items)) == {int}:  # the loop below costs three times as much
        items.sort()
        if items[0] >= 0 and items[-1] < count and len(set(items)) == len(items):
            return claim, tuple(items)
    for item in items:
        index = as_integer(item)
        if index is None:
            hint = " (a mask? return the indices)" if isinstance(item, bool) else ""
            refuse(solver, f"returned {item!r} where {article} {what} index is due{hint}")
        if not 0 <= index < count:
            refuse(solver, f"returned index {index}, but the {what}s are 0 to {count - 1}")
        saved.append(index)
    saved.sort()
    for index, following in pairwise(saved):
        if index == following:
            refuse(solver, f"returned index {index} twice")
    return claim, tuple(saved)


def _bound(solver: Solver, claim: Answer, reached: int) -> int | None:
    """The bound that the answer claims; with the status OPTIMAL it is what the answer reaches."""
    bound = number_of(solver, "bound", claim.bound)
    if claim.status is not Status.OPTIMAL:
        return bound
    if bound is not None and bound != reached:
        refuse(solver, f"claims OPTIMAL at {reached} and, with it, a bound of {bound}")
    return reached


def runs_of(solver: Solver, sequence: list[Any], nodes: int) -> list[int]:
    """The runs that a solver returned, as the numbers of nodes.

    Raises:
        SolverError: there are too many, or one is no number.
    """
    most = MOST_RUNS_PER_NODE * max(1, nodes)
    if len(sequence) > most:
        refuse(solver, f"returned more than {most} runs, {MOST_RUNS_PER_NODE} for each node")
    runs = []
    for position, item in enumerate(sequence):
        node = as_integer(item)
        if node is None:
            refuse(solver, f"returned {item!r} as run {position}, where a node's number is due")
        runs.append(node)
    return runs


def bounds_of(solver: Solver, claim: object, least: int, reached: int) -> tuple[int, int | None]:
    """The proven lower bound on the cost of a schedule, and a tighter one that a stranger claims.

    Args:
        solver: who claims a bound; ours are believed.
        claim: the bound; None where there is none.
        least: what every schedule costs in any case.
        reached: what the solver's own schedule costs.

    Raises:
        SolverError: the claim is no integer, or above what is reached.
    """
    bound = number_of(solver, "bound", claim)
    if bound is not None and bound > reached:
        refuse(
            solver,
            f"claims that every schedule costs at least {bound}, but its own costs {reached}",
        )
    if bound is None or bound <= least:
        return least, None
    return (bound, None) if built_in(solver) else (least, bound)


def number_of(solver: Solver, what: str, claimed: object) -> int | None:
    if claimed is None:
        return None
    number = as_integer(claimed)
    if number is None:
        refuse(solver, f"claims a {what} of {claimed!r}, which is no integer: round it, bounds up")
    return number


def refuse(solver: Solver, fault: str) -> NoReturn:
    raise SolverError(solver.name, f"solver '{solver.name}' {fault}")
