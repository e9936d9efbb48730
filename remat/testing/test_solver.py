"""The conformance suite: what remat relies on in any knapsack solver.

Run it on a solver with ``pytest --pyargs remat.testing --solver=NAME``, from any folder.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from remat.plugins.checks import check_solver
from remat.solvers.base import Solver
from remat.solvers.columns import INT64_MAX
from remat.solvers.isolation import isolated, obstacle
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run
from remat.solvers.solution import Solution
from remat.testing.cases import Case, cases
from remat.testing.families import FAMILIES, Draw, family
from remat.testing.laws import any_order, any_problem, holds
from remat.testing.oracle import brute_force

#: Run on knapsack solvers only.
SOLVES = "knapsack"

_DRAWS = 40
_GRACE_S = 3.0  # what a busy machine may add to a time limit


def skip_if_refused(solver: Solver, problem: KnapsackProblem) -> None:
    """Skips the test, with the solver's reason, if the solver refuses the problem."""
    reason = solver.refuses(problem)
    if reason is not None:
        pytest.skip(f"solver '{solver.name}' refuses: {reason}")


def solved(solver: Solver, problem: KnapsackProblem) -> Solution:
    """Solve and check; a problem that the solver refuses skips the test."""
    skip_if_refused(solver, problem)
    return run(solver, problem)


def assert_honest(solver: Solver, solution: Solution, optimum: int, label: str) -> None:
    """Check a verified solution's claims against the known optimum."""
    claimed = _claimed(solution)
    if claimed == solution.value:
        assert solution.value == optimum, (
            f"{label}: {solver.name} claims {solution.value} to be optimal, but {optimum} exists"
        )
    assert claimed >= optimum, (
        f"{label}: {solver.name} claims that nothing beats {claimed}, but {optimum} exists"
    )
    if solver.exact:
        assert claimed == solution.value, (
            f"{label}: {solver.name} declares exact = True, yet proved no more than "
            f"{solution.value} to {solution.bound}"
        )


def _claimed(solution: Solution) -> int:
    """The bound that the solver claims, proven here or not."""
    return solution.bound if solution.claimed_bound is None else solution.claimed_bound


def assert_agree(solver: Solver, one: Solution, other: Solution, factor: int, label: str) -> None:
    """Check two answers against each other; the optimum of ``other``'s problem is no smaller.

    Args:
        solver: who gave both.
        one: the answer to the problem with the smaller optimum.
        other: the answer to the other problem.
        factor: units of value of ``other`` in one unit of ``one``.
        label: what to call the problems in messages.
    """
    assert factor * one.value <= _claimed(other), (
        f"{label}: {solver.name} claims that nothing beats {_claimed(other)}, but its own answer of "
        f"{factor * one.value} does"
    )
    if solver.exact:
        assert factor * one.value <= other.value, (
            f"{label}: {solver.name} declares exact = True, yet finds {other.value} where "
            f"its own answer of {factor * one.value} is possible"
        )


def test_is_usable(solver: Solver) -> None:
    """Its class data and signatures are what the registry asks for."""
    assert check_solver(type(solver)) is None


def test_takes_problems_at_all(solver: Solver) -> None:
    """It takes at least half of the small problems, so that something is tested."""
    small = [
        case.problem
        for case in cases()
        if case.certificate is None and case.problem.total_weight < 2**31
    ]
    taken = sum(solver.refuses(problem) is None for problem in small)
    assert 2 * taken >= len(small), (
        f"{solver.name} refuses {len(small) - taken} of {len(small)} problems of at most 20 items "
        f"and sums below 2**31"
    )


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(solver: Solver, case: Case, solve_case: Callable[[Case], Solution]) -> None:
    """Its choice fits, and what it claims is so; an exact solver proves its answer."""
    assert_honest(solver, solve_case(case), case.optimum, case.name)


@pytest.mark.parametrize("name", FAMILIES)
def test_many_small_problems(solver: Solver, name: str) -> None:
    """Random problems against trying everything, all capacities from tight to loose."""
    for seed in range(20):
        items, share = 1 + seed % 10, 5 * seed + 3
        problem = family(name, items=items, span=30, share=share, seed=seed)
        label = f"family('{name}', items={items}, span=30, share={share}, seed={seed})"
        assert_honest(solver, solved(solver, problem), brute_force(problem), label)


def test_any_problem(solver: Solver) -> None:
    """Whatever the numbers, against trying everything."""

    def law(draw: Draw) -> None:
        problem = any_problem(draw)
        if solver.refuses(problem) is None:
            assert_honest(solver, run(solver, problem), brute_force(problem), repr(problem))

    holds(law, draws=2 * _DRAWS)


def test_numbers_up_to_its_limit(solver: Solver) -> None:
    """It solves problems with sums at its ``integer_limit``, or at 2**63 - 1."""
    limit = INT64_MAX if solver.integer_limit is None else solver.integer_limit
    unit = limit // 25
    problem = KnapsackProblem(
        (3 * unit, 4 * unit, 5 * unit, 6 * unit, 7 * unit + limit % 25),
        (7 * unit + limit % 25, 3 * unit, 4 * unit, 6 * unit, 5 * unit),
        min(13 * unit + 1, limit),
    )
    reason = solver.refuses(problem)
    assert reason is None or solver.integer_limit is None, (
        f"{solver.name} declares integer_limit = {limit} and refuses sums of it: {reason}"
    )
    assert_honest(solver, solved(solver, problem), brute_force(problem), repr(problem))


def test_answers_repeat(solver: Solver) -> None:
    """Asked twice, it answers the same."""
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' declares deterministic = False")
    for case in cases():
        if len(case.problem) > 60 or solver.refuses(case.problem) is not None:
            continue
        first, second = run(solver, case.problem), run(solver, case.problem)
        if first.deterministic and second.deterministic:  # neither says that a clock decided
            assert first.saved == second.saved, case.name


def test_order_of_items_does_not_matter(solver: Solver) -> None:
    """What it proves for items in one order holds for them in another order."""

    def law(draw: Draw) -> None:
        problem = any_problem(draw)
        order = any_order(draw, len(problem))
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


@pytest.mark.parametrize("name", FAMILIES)
def test_units_do_not_matter(solver: Solver, name: str) -> None:
    """Counting bytes or cost in another unit changes no optimum."""
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


def test_more_room_is_never_worse(solver: Solver) -> None:
    """The optimum does not fall as the capacity grows."""

    def law(draw: Draw) -> None:
        tight = any_problem(draw)
        more = draw(1, 1 + tight.total_weight // 4)
        loose = KnapsackProblem(tight.weights, tight.values, tight.capacity + more)
        if solver.refuses(tight) is None and solver.refuses(loose) is None:
            label = f"{tight!r} with {more} more"
            assert_agree(solver, run(solver, tight), run(solver, loose), 1, label)

    holds(law, draws=_DRAWS)


@pytest.mark.parametrize("time_limit", [0.001, 0.2])
def test_takes_a_time_limit(solver: Solver, time_limit: float) -> None:
    """With a clock it may stop early, but what it returns still fits and is honest."""
    problem = family("strongly-correlated", items=60, span=10_000, share=50, seed=5)
    skip_if_refused(solver, problem)
    limited, unlimited = run(solver, problem, time_limit=time_limit), run(solver, problem)
    assert limited.value <= unlimited.bound
    assert unlimited.value <= limited.bound


@pytest.mark.parametrize("name", ["strongly-correlated", "circle"])
def test_keeps_its_time_limit(solver: Solver, name: str) -> None:
    """It returns soon after its limit; otherwise its process is killed and the test fails."""
    if not solver.time_limit:
        pytest.skip(f"solver '{solver.name}' declares time_limit = False")
    problem = family(name, items=2_000, span=10**7, share=50, seed=8)
    skip_if_refused(solver, problem)
    limit_s = 0.3
    if obstacle(solver) is None:
        run(isolated(solver, grace_s=_GRACE_S), problem, time_limit=limit_s)
        return
    elapsed_s = run(solver, problem, time_limit=limit_s).elapsed_s
    assert elapsed_s <= limit_s + _GRACE_S, f"{elapsed_s:.1f} s under a limit of {limit_s} s"


def test_leaves_standard_output_alone(solver: Solver, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed to standard output, where other programs read plans."""
    solved(solver, family("weakly-correlated", items=60, span=10**7, share=50, seed=6))
    assert capfd.readouterr().out == ""


def test_hash_seed_does_not_matter(solver: Solver) -> None:
    """Two processes with different hash seeds give the same answers."""
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' declares deterministic = False")
    reason = obstacle(solver)
    if reason is not None:
        pytest.skip(f"solver '{solver.name}' cannot run in another process: {reason}")
    problems = [family(name, items=40, span=300, share=45, seed=7) for name in FAMILIES]
    problems = [problem for problem in problems if solver.refuses(problem) is None]
    answers = []
    for seed in ("1", "2"):
        other = isolated(solver, environment={"PYTHONHASHSEED": seed})
        answers.append([run(other, problem) for problem in problems])
    for one, two in zip(*answers, strict=True):
        if one.deterministic and two.deterministic:
            assert one.saved == two.saved
