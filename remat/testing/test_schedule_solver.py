"""The conformance suite of solvers of the step problem: what remat relies on in any of them.

Run it on your solver with ``pytest --pyargs remat.testing --solver=module:Class``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest

from remat.errors import BudgetError
from remat.solvers.base import Solver
from remat.solvers.run import run
from remat.solvers.schedule_problem import ScheduleProblem, evaluate_schedule, least_peak
from remat.solvers.solution import Schedule, Status
from remat.testing.steps import StepCase, drawn, layered, optimum, step_cases

#: Run on solvers of step problems only.
SOLVES = "schedule"


def once(problem: ScheduleProblem) -> tuple[int, ...]:
    """Every node once, in the problem's own order."""
    return problem.order


def assert_honest(problem: ScheduleProblem, schedule: Schedule, best: int) -> None:
    """Check a verified schedule's claims against the known optimum."""
    assert schedule.bound <= best <= schedule.cost
    assert schedule.claimed_bound is None or schedule.claimed_bound <= best
    assert problem.capacity is None or schedule.peak_bytes <= problem.capacity
    if schedule.status is Status.OPTIMAL:
        assert schedule.cost == best


@pytest.mark.parametrize("case", step_cases(), ids=lambda case: case.name)
def test_case(
    solver: Solver, case: StepCase, solve_step_case: Callable[[StepCase], Schedule | None]
) -> None:
    schedule = solve_step_case(case)
    if schedule is not None:
        assert_honest(case.problem, schedule, case.optimum)


@functools.cache
def _small(block: int) -> list[tuple[ScheduleProblem, int | None]]:
    """Small problems under a capacity that may or may not do, with their optimum."""
    draw, found = random.Random(block), []
    for seed in range(25 * block, 25 * block + 25):
        problem = drawn(seed, nodes=5, plain=seed % 3 == 0)
        full = evaluate_schedule(problem, once(problem)).peak_bytes
        problem = problem.within(draw.randint(max(0, least_peak(problem)[0] - 1), full))
        found.append((problem, optimum(problem)))
    return found


@pytest.mark.parametrize("block", range(4))
def test_small_steps_against_every_schedule(solver: Solver, block: int) -> None:
    answered = 0
    for problem, best in _small(block):
        try:
            schedule = run(solver, problem)
        except BudgetError:  # not found, which is no proof
            continue
        assert best is not None
        assert_honest(problem, schedule, best)
        answered += 1
    assert answered > 0


def test_room_for_everything_is_enough(solver: Solver) -> None:
    for seed in range(20):
        problem = drawn(seed)
        order = once(problem)
        full = evaluate_schedule(problem, order)
        for capacity in (None, full.peak_bytes):
            schedule = run(solver, problem.within(capacity))
            assert schedule.cost >= full.cost == schedule.bound


def test_less_than_a_node_needs_is_refused(solver: Solver) -> None:
    problem = layered(40, width=0.3, seed=1)
    least = least_peak(problem)[0]
    with pytest.raises(BudgetError, match=str(least)):
        run(solver, problem.within(least - 1))


def test_the_answer_repeats(solver: Solver) -> None:
    if not solver.deterministic:
        pytest.skip(f"solver '{solver.name}' does not promise to repeat")
    problem = layered(30, width=0.3, seed=2)
    problem = problem.within(evaluate_schedule(problem, once(problem)).peak_bytes * 9 // 10)
    answers = []
    for _ in range(2):
        try:
            answers.append(run(solver, problem).sequence)
        except BudgetError as error:
            answers.append((str(error),))  # type: ignore[arg-type]
    assert answers[0] == answers[1]


def test_a_time_limit_is_taken(solver: Solver) -> None:
    problem = layered(60, width=0.3, seed=3)
    full = evaluate_schedule(problem, once(problem)).peak_bytes
    assert run(solver, problem.within(full), time_limit=5.0).peak_bytes <= full
