"""The kit catches every wrong solver, and by the case that was made for it.

A mutant that the kit lets pass is a hole in the kit: close it with a case, for everybody. The tests that
must catch a mutant are called in this process. ``tests/plugins/test_example_plugins.py`` runs the kit as
its users do.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import mutants
import pytest

from remat.errors import BudgetError, SolverError
from remat.solvers import Solver
from remat.testing import test_solver as kit
from remat.testing.cases import Case, cases
from remat.testing.samples import HARD, PLAIN, ROOMY, SMALL

#: Mutant: the tests of the kit that must catch it, with their parameter in brackets.
CAUGHT_BY = {
    "TorchGreedy": ("test_case[weightless]", "test_case[beyond-doubles]"),
    "TorchIlp": ("test_case[gigabytes]", "test_case[32-identical-layers]"),
    "TorchDp": ("test_case[3000-equal-weights]", "test_any_problem"),
    "StrictRoom": ("test_case[exact-fit]", "test_case[last-unit]"),
    "Int32": ("test_case[gigabytes]", "test_case[past-int32]"),
    "RoundsToDoubles": (
        "test_case[two-items-one-byte-short]",
        "test_case[two-terabytes-one-byte-short]",
    ),
    "DropsWeightless": ("test_case[weightless]",),
    "GreedyCalledOptimal": ("test_case[greedy-trap]", "test_case[half-trap]"),
    "OptimalOfTheFirst": (
        "test_many_small_problems[uncorrelated]",
        "test_order_of_items_does_not_matter",
    ),
    "HashOrder": ("test_hash_seed_does_not_matter[knapsack]",),
    "Remembers": ("test_answers_repeat[knapsack]",),
    "IgnoresTheClock": ("test_keeps_its_time_limit[circle]",),
    "Chatty": ("test_leaves_standard_output_alone[knapsack]",),
    "Recursive": ("test_case[20000-items]",),
    "RefusesEverything": ("test_takes_problems_at_all",),
    "LiesAboutItsLimit": ("test_numbers_up_to_its_limit",),
    "SavesWhatCannotBeSaved": ("test_many_small_problems[graphs-1]",),
    "SavesTheLeast": ("test_room_for_everything_is_enough[graph]",),
    "KeepsEverything": ("test_case[one-layer-again]", "test_many_small_problems[steps-0]"),
    "ForgetsExtra": ("test_case[bytes-while-running]",),
    "ForgetsResident": ("test_case[always-there]",),
    "ForgetsOrder": ("test_case[fixed-order]",),
    "ForgetsOnce": ("test_case[once-only]",),
    "ForgetsTheEnd": ("test_case[stays-to-the-end]",),
    "ForgetsTheBoundary": ("test_case[forward-listed-late]",),
    "OptimalByItsWord": ("test_case[no-capacity]", "test_many_small_problems[steps-1]"),
    "FindsNothing": ("test_many_small_problems[steps-0]",),
    "DrawsAnew": ("test_answers_repeat[schedule]",),
}
#: The sound solver of each kind.
SOUND = {"knapsack": "Sound", "graph": "SoundGraphs", "schedule": "SoundSteps"}
#: By name, each mutant, each sound solver and the base classes.
PLANTED = {
    name: kind
    for name, kind in vars(mutants).items()
    if isinstance(kind, type) and kind.__module__ == "mutants"
}
#: The tests of the kit that take a sample.
SAMPLED = {
    SMALL: ("test_many_small_problems",),
    ROOMY: ("test_room_for_everything_is_enough",),
    HARD: ("test_keeps_its_time_limit",),
    PLAIN: (
        "test_answers_repeat",
        "test_hash_seed_does_not_matter",
        "test_leaves_standard_output_alone",
    ),
}


def fresh(name: str) -> Case:
    """A case of the kit with a problem of its own: a mutant may change what it is given."""
    case = next(case for case in cases() if case.name == name)
    return dataclasses.replace(case, problem=dataclasses.replace(case.problem))


def call(test: str, solver: Solver, capfd: pytest.CaptureFixture[str]) -> None:
    """Call a test of the kit as pytest would; its one parameter stands in brackets."""
    name, _, parameter = test.removesuffix("]").partition("[")
    function = getattr(kit, name)
    given: dict[str, Any] = {"solver": solver, "capfd": capfd, "name": parameter}
    if name == "test_case":
        given["case"] = fresh(parameter)
    for samples, tests in SAMPLED.items():
        if name in tests:
            given["sample"] = next(sample for sample in samples if sample.name == parameter)
    function(**{wanted: given[wanted] for wanted in inspect.signature(function).parameters})


@pytest.mark.parametrize(
    ("mutant", "test"), [(mutant, test) for mutant, tests in CAUGHT_BY.items() for test in tests]
)
def test_the_kit_catches(mutant: str, test: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        call(test, PLANTED[mutant](), capfd)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"{test} does not look at {mutant}: {skipped}")
    except (AssertionError, SolverError, BudgetError):
        return
    pytest.fail(f"{test} lets {mutant} pass")


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_solver_passes_what_catches_the_mutants(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sound = PLANTED[SOUND[kind]]
    used = {t for m, tests in CAUGHT_BY.items() if kind in PLANTED[m].solves for t in tests}
    for test in sorted(used):
        call(test, sound(), capfd)


def test_every_mutant_is_tried() -> None:
    assert PLANTED.keys() - {"FromTorch", "Forgets", *SOUND.values()} == CAUGHT_BY.keys()
