"""The stages of a command: told on standard error, one line each, unless it is to be quiet."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from remat.cli import main
from tests.cli.models import BLOCK, folder_with

MODELS = (
    BLOCK
    + """
def blocks():
    return torch.nn.Sequential(*(Block() for _ in range(2))), (torch.randn(8, 16),)
"""
)
MODEL = "progress_blocks.py:blocks"
folder = folder_with("progress_blocks", MODELS)

#: Seconds, and what took them.
STAGE = re.compile(r"^ *\d+\.\d s  (.+)$")


def stages(*args: str) -> list[str]:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    return [m[1] for m in map(STAGE.match, done.stderr.splitlines()) if m]


def test_a_pipe_gets_one_line_a_stage() -> None:
    found = stages("plan", MODEL, "--budget", "0.5", "--plot", "step.svg")
    assert found == [f"building {MODEL}", f"capturing {MODEL}", "planning", "drawing"]


@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_silences_it(flag: str) -> None:
    assert stages("plan", MODEL, flag) == []


def test_steps_of_a_stage_are_no_lines() -> None:
    found = stages("compare", MODEL, "--solvers", "greedy,dp", "--budgets", "0.2,0.5")
    assert found[2:] == ["comparing 4 plans"]


def test_a_stage_that_fails_says_so() -> None:
    done = CliRunner().invoke(main, ["plan", MODEL, "--budget", "peak:1B"])
    assert done.exit_code == 1
    assert re.search(r"^ *\d+\.\d s  planning, not finished$", done.stderr, re.MULTILINE)


def test_standard_output_stays_the_result() -> None:
    loud, quiet = (
        CliRunner().invoke(main, ["plan", MODEL, "--json", *more]).stdout for more in ((), ("-q",))
    )
    assert [x for x in loud.splitlines() if "solve_s" not in x] == [
        x for x in quiet.splitlines() if "solve_s" not in x
    ]
