"""Test that a solver meets the requirements of the conformance suite, for every kind of problem that it solves.

Run the suite with ``pytest --pyargs remat.testing --solver=NAME``, from any folder. A test whose
parameter is a problem, or a set of problems, runs only on solvers of that kind of problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from remat.errors import BudgetError
from remat.plugins.checks import check_solver
from remat.solvers.base import Solver
from remat.solvers.columns import INT64_MAX
from remat.solvers.isolation.process import isolated, obstacle
from remat.solvers.problem import KnapsackProblem, Problem
from remat.solvers.run import run
from remat.solvers.solution import GraphSolution, Schedule, Solution
from remat.testing.cases import Case, cases
from remat.testing.families import FAMILIES, Draw, drawer, family
from remat.testing.graphs import random_graph
from remat.testing.oracle import brute_force, decisions, optimum
from remat.testing.plugin import for_solvers_of
from remat.testing.samples import HARD, PLAIN, ROOMY, SMALL, Sample, refusal, solved

#: A verified answer to any kind of problem.
AnySolution = Solution | GraphSolution | Schedule

_DRAWS = 40
#: Upper bounds on the numbers of random knapsacks: some have small numbers only, and others huge ones.
_SPANS = (3, 20, 10**4, 10**9, 2**50)
_GRACE_S = 3.0  # a busy machine may delay a solver by this much


def each(samples: Sequence[Sample]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test once for each sample, on solvers that solve the sample's problems."""
    return pytest.mark.parametrize("sample", samples, ids=lambda sample: sample.name)


def reached(problem: Problem[Any], solution: AnySolution) -> int:
    """Return the value of a solver's answer, or the answer's negated cost, so that a larger number is better."""
    figure: int = getattr(solution, problem.objective)
    return figure if problem.maximises else -figure


def claimed(problem: Problem[Any], solution: AnySolution) -> int:
    """Return the bound on the optimum that a solver claims, proven or not; negated if the objective is a cost."""
    bound = solution.bound if solution.claimed_bound is None else solution.claimed_bound
    return bound if problem.maximises else -bound


def assert_honest(
    solver: Solver, problem: Problem[Any], solution: AnySolution, optimum: int | None, label: str
) -> None:
    """Assert that a solution, and the solver's claims about it, agree with the problem's known optimum.

    No answer may be better than the optimum, and no claimed bound may exclude the optimum. On a knapsack, an exact
    solver must also prove its answer optimal. The assertion fails if ``optimum`` is None, which means that no answer
    fits. ``label`` names the problem in messages.
    """
    assert optimum is not None, f"{label}: nothing fits, and yet {solution} was taken"
    best = optimum if problem.maximises else -optimum
    value, bound = reached(problem, solution), claimed(problem, solution)
    assert value <= best, f"{label}: {solution} was taken, but nothing is better than {optimum}"
    if bound == value:
        assert value == best, (
            f"{label}: {solver.name} claims {abs(value)} to be optimal, but {optimum} exists"
        )
    assert bound >= best, (
        f"{label}: {solver.name} claims that nothing beats {abs(bound)}, but {optimum} exists"
    )
    if solver.exact and isinstance(problem, KnapsackProblem):
        assert bound == value, (
            f"{label}: {solver.name} declares exact = True, yet proved no more than "
            f"{value} to {solution.bound}"
        )


def assert_agree(solver: Solver, one: Solution, other: Solution, factor: int, label: str) -> None:
    """Assert that a solver's answers to two related knapsacks do not contradict each other.

    The caller ensures that the second knapsack's optimum is at least ``factor`` times the first knapsack's optimum.
    Therefore the bound of the answer ``other`` must be at least ``factor * one.value``. If the solver is exact, the
    value of the answer ``other`` must be at least ``factor * one.value``, too.
    """
    bound = other.bound if other.claimed_bound is None else other.claimed_bound
    assert factor * one.value <= bound, (
        f"{label}: {solver.name} claims that nothing beats {bound}, but its own answer of "
        f"{factor * one.value} does"
    )
    if solver.exact:
        assert factor * one.value <= other.value, (
            f"{label}: {solver.name} declares exact = True, yet finds {other.value} where "
            f"its own answer of {factor * one.value} is possible"
        )


def taken(solver: Solver, sample: Sample) -> list[Problem[Any]]:
    """Return those problems of a sample that a solver does not refuse."""
    return [problem for problem in sample.draw() if refusal(solver, problem) is None]


def assert_alike(one: AnySolution | None, other: AnySolution | None) -> None:
    """Assert that two answers to one problem are equal if both answers are deterministic.

    An answer of None stands for a search that found no schedule.
    """
    if one is None or other is None:  # no schedule was found
        assert one is other
    elif one.deterministic and other.deterministic:
        assert choice(one) == choice(other)


def choice(solution: AnySolution) -> Sequence[int]:
    """Return what a solution chooses: the indices of the saved items or nodes, or the sequence of a schedule."""
    return solution.sequence if isinstance(solution, Schedule) else solution.saved


def holds(law: Callable[[Draw], None], *, draws: int) -> None:
    """Check a law, a function that draws a problem and asserts a property, on ``draws`` random problems.

    A law is checked on the same problems in every run. Hypothesis, if it is installed, tries corner
    cases and reduces a failing problem to a small one.
    """
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st
    except ModuleNotFoundError:
        for seed in range(draws):
            law(drawer(seed))
        return

    @settings(
        max_examples=draws,
        deadline=None,  # a slow solver is not a wrong solver
        derandomize=True,  # the suite must give the same verdict in every run
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        law(lambda low, high: data.draw(st.integers(low, high)))

    check()


def any_problem(draw: Draw) -> KnapsackProblem:
    """Draw a knapsack of up to nine items; weights and values may be zero or equal."""
    span = _SPANS[draw(0, len(_SPANS) - 1)]
    count = draw(0, 9)
    weights = tuple(draw(0, span) for _ in range(count))
    values = tuple(draw(0, span) for _ in range(count))
    return KnapsackProblem(weights, values, draw(0, sum(weights) + 1))


def test_is_usable(solver: Solver) -> None:
    """The solver's class attributes and method signatures meet the requirements of the plugin registry."""
    assert check_solver(type(solver)) is None


@for_solvers_of("knapsack")
def test_takes_problems_at_all(solver: Solver) -> None:
    """The solver accepts at least half of the small knapsacks, so that other tests have problems for it."""
    small = [
        case.problem
        for case in cases()
        if isinstance(case.problem, KnapsackProblem)
        and case.certificate is None
        and case.problem.total_weight < 2**31
    ]
    refused = sum(refusal(solver, problem) is not None for problem in small)
    assert 2 * refused <= len(small), (
        f"{solver.name} refuses {refused} of {len(small)} problems of at most 20 items "
        f"and sums below 2**31"
    )


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(solver: Solver, case: Case) -> None:
    """The solver's answer to a case fits the capacity, and the solver's claims about the answer are true.

    On a knapsack, an exact solver proves its answer optimal.
    """
    solution = solved(solver, case.problem)
    if solution is not None:
        assert_honest(solver, case.problem, solution, case.optimum, case.name)


@each(SMALL)
def test_many_small_problems(solver: Solver, sample: Sample) -> None:
    """On small random problems, the solver's answers and claimed bounds agree with the known optimum."""
    answered = 0
    for problem in sample.draw():
        solution = solved(solver, problem)
        if solution is not None:
            answered += 1
            assert_honest(solver, problem, solution, optimum(problem), repr(problem))
    assert answered, f"{solver.name} finds nothing for any problem of {sample.name}"


@each(ROOMY)
def test_room_for_everything_is_enough(solver: Solver, sample: Sample) -> None:
    """If a problem's capacity suffices to save everything, the solver finds an answer.

    If the capacity of a graph problem suffices to save everything, the answer recomputes no node that has a cost.
    """
    for problem in sample.draw():
        solution = run(solver, problem)
        least = problem.limits().bound
        assert_honest(solver, problem, solution, least, repr(problem))
        assert sample.kind != "graph" or solution.cost == least


@for_solvers_of("graph")
def test_less_than_the_least_is_refused(solver: Solver) -> None:
    """If no decision fits a problem's capacity, the `BudgetError` states the least capacity that suffices."""
    for problem in map(random_graph, range(1_000)):
        least = min((e.saved_bytes for e in decisions(problem)), default=0)
        if least > 0:
            break
    with pytest.raises(BudgetError, match=str(least)):
        run(solver, problem.within(least - 1))


@for_solvers_of("knapsack")
def test_any_problem(solver: Solver) -> None:
    """On knapsacks of small and huge numbers, the solver's answers and bounds agree with the known optimum."""

    def law(draw: Draw) -> None:
        problem = any_problem(draw)
        if solver.refuses(problem) is None:
            best = brute_force(problem)
            assert_honest(solver, problem, run(solver, problem), best, repr(problem))

    holds(law, draws=2 * _DRAWS)


@for_solvers_of("knapsack")
def test_numbers_up_to_its_limit(solver: Solver) -> None:
    """The solver solves a knapsack whose weights and values each add up to its ``integer_limit``.

    If the solver's ``integer_limit`` is None, weights and values each add up to 2**63 - 1, and the solver may
    refuse the knapsack.
    """
    limit = INT64_MAX if solver.integer_limit is None else solver.integer_limit
    unit = limit // 25  # 25 units and the remainder make both sums equal to the limit
    problem = KnapsackProblem(
        (3 * unit, 4 * unit, 5 * unit, 6 * unit, 7 * unit + limit % 25),
        (7 * unit + limit % 25, 3 * unit, 4 * unit, 6 * unit, 5 * unit),
        min(13 * unit + 1, limit),
    )
    reason = solver.refuses(problem)
    assert reason is None or solver.integer_limit is None, (
        f"{solver.name} declares integer_limit = {limit} and refuses sums of it: {reason}"
    )
    assert_honest(solver, problem, solved(solver, problem), brute_force(problem), repr(problem))


@for_solvers_of("knapsack")
def test_order_of_items_does_not_matter(solver: Solver) -> None:
    """The solver's answers to a knapsack with its items in two different orders do not contradict each other."""

    def law(draw: Draw) -> None:
        problem = any_problem(draw)
        order = sorted(range(len(problem)), key=lambda _: draw(0, 2**20))
        shuffled = KnapsackProblem(
            tuple(problem.weights[i] for i in order),
            tuple(problem.values[i] for i in order),
            problem.capacity,
        )
        if solver.refuses(problem) is None and solver.refuses(shuffled) is None:
            one, other = run(solver, problem), run(solver, shuffled)
            label = f"{problem!r} in the order {order}"
            assert_agree(solver, one, other, 1, label)
            assert_agree(solver, other, one, 1, label)

    holds(law, draws=_DRAWS)


@for_solvers_of("knapsack")
@pytest.mark.parametrize("name", FAMILIES)
def test_units_do_not_matter(solver: Solver, name: str) -> None:
    """The solver's answers to a knapsack in two systems of units do not contradict each other."""
    # All weights are multiples of `factor`, so `factor - 1` further bytes of capacity allow no other choice.
    problem = family(name, items=30, span=200, share=40, seed=3)
    coarse = solved(solver, problem)
    for factor in (3, 2**20 + 1):
        other = KnapsackProblem(
            tuple(factor * w for w in problem.weights),
            tuple(factor * v for v in problem.values),
            factor * problem.capacity + factor - 1,
        )
        fine = solved(solver, other)
        assert_agree(solver, coarse, fine, factor, f"{name} times {factor}")
        assert fine.value <= factor * coarse.bound


@for_solvers_of("knapsack")
def test_more_room_is_never_worse(solver: Solver) -> None:
    """The solver's answers to a knapsack with a smaller and a larger capacity do not contradict each other.

    The value of the answer at the smaller capacity is at most the bound claimed at the larger
    capacity.
    """

    def law(draw: Draw) -> None:
        tight = any_problem(draw)
        more = draw(1, 1 + tight.total_weight // 4)
        loose = KnapsackProblem(tight.weights, tight.values, tight.capacity + more)
        if solver.refuses(tight) is None and solver.refuses(loose) is None:
            label = f"{tight!r} with {more} more"
            assert_agree(solver, run(solver, tight), run(solver, loose), 1, label)

    holds(law, draws=_DRAWS)


@pytest.mark.parametrize("time_limit", [0.001, 0.2])
@each(PLAIN)
def test_takes_a_time_limit(solver: Solver, sample: Sample, time_limit: float) -> None:
    """A solver with a time limit may stop early, but the answer fits the capacity and the claimed bound is true.

    A bound is true if no answer found with or without the time limit exceeds the bound.
    """
    for problem in taken(solver, sample):
        limited, unlimited = solved(solver, problem, time_limit=time_limit), solved(solver, problem)
        if limited is not None and unlimited is not None:
            assert reached(problem, limited) <= claimed(problem, unlimited)
            assert reached(problem, unlimited) <= claimed(problem, limited)


@each(HARD)
def test_keeps_its_time_limit(solver: Solver, sample: Sample) -> None:
    """The solver returns soon after its time limit has passed.

    If possible, the solver runs in another process, which is killed if the solver does not return.
    """
    if not solver.time_limit:
        pytest.skip(f"solver '{solver.name}' declares time_limit = False")
    limit_s = 0.3
    (problem,) = sample.draw()
    if obstacle(solver) is None:
        solved(isolated(solver, grace_s=_GRACE_S), problem, time_limit=limit_s)
        return
    started = time.monotonic()
    solved(solver, problem, time_limit=limit_s)
    elapsed_s = time.monotonic() - started
    assert elapsed_s <= limit_s + _GRACE_S, f"{elapsed_s:.1f} s under a limit of {limit_s} s"


@each(PLAIN)
def test_leaves_standard_output_alone(
    solver: Solver, sample: Sample, capfd: pytest.CaptureFixture[str]
) -> None:
    """The solver prints nothing to standard output, from which other programs read plans."""
    for problem in taken(solver, sample):
        solved(solver, problem)
    assert capfd.readouterr().out == ""


@each(PLAIN)
def test_answers_repeat(solver: Solver, sample: Sample) -> None:
    """If a deterministic solver solves a problem twice, the two answers are equal.

    Without a time limit, no solution may report that the clock ended the search.
    """
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' declares deterministic = False")
    for problem in taken(solver, sample):
        solution = solved(solver, problem)
        assert solution.deterministic, "by_clock is set, but the solver got no time limit"
        assert_alike(solution, solved(solver, problem))


@each(PLAIN)
def test_hash_seed_does_not_matter(solver: Solver, sample: Sample) -> None:
    """A deterministic solver gives the same answers in two processes with different hash seeds."""
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' declares deterministic = False")
    reason = obstacle(solver)
    if reason is not None:
        pytest.skip(f"solver '{solver.name}' cannot run in another process: {reason}")
    one, other = (isolated(solver, environment={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    for problem in taken(solver, sample):
        assert_alike(solved(one, problem), solved(other, problem))
