"""The kit catches every wrong solver, and by the case that was made for it.

A mutant that the kit lets pass is a hole in the kit: close it with a case, for everybody.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

#: Mutant: what must catch it, at least.
CAUGHT_BY = {
    "TorchGreedy": ("test_case[weightless", "test_case[beyond-doubles"),
    "TorchIlp": ("test_case[gigabytes", "test_case[32-identical-layers"),
    "TorchDp": ("test_case[3000-equal-weights", "test_any_problem"),
    "TorchHirschberg": ("test_case[3000-equal-weights", "test_any_problem"),
    "StrictRoom": ("test_case[exact-fit", "test_case[last-unit"),
    "OneByteOver": ("test_case[greedy-trap", "test_case[last-unit"),
    "Doubles": ("test_case[one-more-than-doubles-tell",),
    "Int32": ("test_case[gigabytes", "test_case[past-int32"),
    "DropsWeightless": ("test_case[weightless",),
    "SameItemTwice": ("test_case[equal-items",),
    "GreedyCalledOptimal": ("test_case[greedy-trap", "test_case[half-trap"),
    "OptimalOfTheFirst": ("test_many_small_problems", "test_order_of_items_does_not_matter"),
    "HashOrder": ("test_hash_seed_does_not_matter",),
    "Remembers": ("test_answers_repeat",),
    "IgnoresTheClock": ("test_keeps_its_time_limit",),
    "Chatty": ("test_leaves_standard_output_alone",),
    "Recursive": ("test_case[3000-equal-weights", "test_case[20000-items"),
    "RefusesEverything": ("test_takes_problems_at_all",),
    "LiesAboutItsLimit": ("test_numbers_up_to_its_limit",),
    "ChangesTheProblem": ("test_case[greedy-trap",),
}
#: PyTorch's need a gigabyte and minutes at 20,000 items, so they face a part of the kit.
QUICK = "(test_case and not 20000) or test_any_problem"


def failures(mutant: str) -> tuple[list[str], str]:
    """The names of the kit's tests that a mutant fails, and what pytest printed."""
    selected = ["-k", QUICK] if mutant.startswith("Torch") else []
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--pyargs", "remat.testing"),
            *(f"--solver=mutants:{mutant}", "-q", "--tb=no", "-rfE", *selected),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", FOLDER),
        ],
        cwd=FOLDER,
        capture_output=True,
        text=True,
    )
    return re.findall(r"^(?:FAILED|ERROR) \S*::(.+?)(?: - |$)", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_the_kit_catches(mutant: str) -> None:
    failed, printed = failures(mutant)
    table = "\n".join(f"    {name}" for name in failed) or "    nothing"
    assert failed, f"the kit lets {mutant} pass:\n{printed}"
    missed = [name for name in CAUGHT_BY[mutant] if not any(f.startswith(name) for f in failed)]
    assert not missed, f"{mutant} passes {', '.join(missed)}; it was caught by\n{table}"


def test_the_kit_lets_a_sound_solver_pass() -> None:
    failed, printed = failures("Sound")
    assert not failed, printed
    assert re.search(r"\d+ passed", printed), printed


def test_every_mutant_is_tried() -> None:
    import mutants

    planted = {
        name
        for name, kind in vars(mutants).items()
        if isinstance(kind, type) and kind.__module__ == "mutants"
    }
    assert planted - {"FromTorch", "Sound"} == set(CAUGHT_BY)
    assert len(CAUGHT_BY) >= 14
