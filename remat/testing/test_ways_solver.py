"""The conformance suite of solvers of problems with ways: what remat relies on in any of them.

Run it on your solver with ``pytest --pyargs remat.testing --solver=module:Class``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.errors import BudgetError
from remat.solvers.base import Solver
from remat.solvers.run_ways import run_ways
from remat.solvers.solution import Status, WaysSchedule
from remat.solvers.ways_problem import WaysProblem, evaluate_ways, follow
from remat.testing.ways import WaysCase, cheapest, drawn, ways_cases

#: Run on solvers of problems with ways only.
SOLVES = "ways"


def assert_honest(problem: WaysProblem, found: WaysSchedule, decision: int | None) -> None:
    """Check a verified answer's claims.

    Args:
        problem: what was solved.
        found: the answer.
        decision: the least cost of any decision that keeps forward's order; another order may cost less.
    """
    followed = follow(problem, found.sequence, found.boundary)
    done = evaluate_ways(problem, followed, found.ways, problem.step.capacity)
    assert (found.cost, found.waited, found.peak_bytes) == (done.cost, done.waited, done.peak_bytes)
    assert problem.step.capacity is None or found.peak_bytes <= problem.step.capacity
    for bound in (found.bound, found.claimed_bound):
        assert bound is None or decision is None or bound <= decision
    if found.status is Status.OPTIMAL:
        assert decision is None or found.cost <= decision


@pytest.mark.parametrize("case", ways_cases(), ids=lambda case: case.name)
def test_case(solver: Solver, case: WaysCase) -> None:
    try:
        found = run_ways(solver, case.problem)
    except BudgetError:  # not found, which is no proof
        return
    assert_honest(case.problem, found, case.optimum)


@pytest.mark.parametrize("block", range(4))
def test_small_steps_against_every_decision(solver: Solver, block: int) -> None:
    answered = 0
    for seed in range(25 * block, 25 * block + 25):
        problem = drawn(seed, most=4)
        try:
            found = run_ways(solver, problem)
        except BudgetError:
            continue
        assert_honest(problem, found, cheapest(problem))
        answered += 1
    assert answered > 0


def test_room_for_everything_is_enough(solver: Solver) -> None:
    for seed in range(20):
        problem = drawn(seed)
        for capacity in (None, sum(problem.step.size) + problem.step.resident):
            free = replace(problem, step=problem.step.within(capacity))
            assert_honest(free, run_ways(solver, free), None)


def test_the_answer_repeats(solver: Solver) -> None:
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' does not promise to repeat")
    for seed in range(10):
        answers = []
        for _ in range(2):
            try:
                found = run_ways(solver, drawn(seed))
                answers.append((found.sequence, dict(found.ways)))
            except BudgetError:
                answers.append(((), {}))
        assert answers[0] == answers[1]


def test_a_time_limit_is_taken(solver: Solver) -> None:
    problem = drawn(3)
    free = replace(problem, step=problem.step.within(sum(problem.step.size) + 10))
    assert run_ways(solver, free, time_limit=5.0).peak_bytes <= sum(problem.step.size) + 10
