"""The kit catches every wrong solver of the step problem, as `test_mutants` does for the knapsack."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import step_mutants

from remat.errors import BudgetError, SolverError
from remat.solvers.base import Solver
from remat.solvers.run import run
from remat.solvers.solution import Schedule
from remat.testing import test_schedule_solver as kit
from remat.testing.steps import StepCase, step_cases

#: Mutant: the tests of the kit that must catch it, with their parameter in brackets.
CAUGHT_BY = {
    "KeepsEverything": ("test_case[one-layer-again]", "test_small_steps_against_every_schedule[0]"),
    "ForgetsExtra": ("test_case[bytes-while-running]",),
    "ForgetsResident": ("test_case[always-there]",),
    "ForgetsOrder": ("test_case[fixed-order]",),
    "ForgetsOnce": ("test_case[once-only]",),
    "ForgetsTheEnd": ("test_case[stays-to-the-end]",),
    "ForgetsTheBoundary": ("test_case[forward-listed-late]",),
    "Backwards": ("test_case[no-capacity]", "test_room_for_everything_is_enough"),
    "LeavesOneOut": ("test_case[no-capacity]", "test_a_time_limit_is_taken"),
    "RunsForEver": ("test_case[no-capacity]",),
    "OptimalByItsWord": ("test_case[no-capacity]", "test_small_steps_against_every_schedule[1]"),
    "FindsNothing": ("test_small_steps_against_every_schedule[0]",),
    "DrawsAnew": ("test_the_answer_repeats",),
}


def call(test: str, solver: Solver) -> None:
    """Call a test of the kit as pytest would; its one parameter stands in brackets."""
    name, _, parameter = test.removesuffix("]").partition("[")

    def solve(case: StepCase) -> Schedule | None:
        try:
            return run(solver, case.problem)
        except BudgetError:
            return None

    given: dict[str, Any] = {"solver": solver, "solve_step_case": solve}
    if name == "test_case":
        given["case"] = next(case for case in step_cases() if case.name == parameter)
    elif parameter:
        given["block"] = int(parameter)
    function = getattr(kit, name)
    function(**{wanted: given[wanted] for wanted in inspect.signature(function).parameters})


@pytest.mark.parametrize(
    ("mutant", "test"), [(mutant, test) for mutant, tests in CAUGHT_BY.items() for test in tests]
)
def test_the_kit_catches(mutant: str, test: str) -> None:
    try:
        call(test, getattr(step_mutants, mutant)())
    except pytest.skip.Exception as skipped:
        pytest.fail(f"{test} does not look at {mutant}: {skipped}")
    except (AssertionError, SolverError):
        return
    pytest.fail(f"{test} lets {mutant} pass")


def test_a_sound_solver_passes_what_catches_the_mutants() -> None:
    for test in sorted({test for tests in CAUGHT_BY.values() for test in tests}):
        call(test, step_mutants.SoundSteps())


def test_every_mutant_is_tried() -> None:
    planted = {
        name
        for name, kind in vars(step_mutants).items()
        if isinstance(kind, type) and kind.__module__ == "step_mutants"
    }
    assert planted - {"SoundSteps"} == set(CAUGHT_BY)
