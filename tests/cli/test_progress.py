"""The stages of a command: told on standard error, one line each, unless it is to be quiet."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from remat.cli import main

MODEL = "nets.py:block"
#: Seconds, and what took them.
STAGE = re.compile(r"^ *\d+\.\d s  (.+)$")


def stages(*args: str, code: int = 0) -> tuple[list[str], str]:
    """The stages that a command tells, and its result but for seconds."""
    done = CliRunner().invoke(main, [*args, "--lower", "eager"])
    assert done.exit_code == code, done.output
    result = [line for line in done.stdout.splitlines() if "solve_s" not in line]
    return [m[1] for m in map(STAGE.match, done.stderr.splitlines()) if m], "\n".join(result)


def test_a_pipe_gets_one_line_a_stage() -> None:
    found, _ = stages("plan", MODEL, "--budget", "0.5", "--plot", "step.svg")
    assert found == [f"building {MODEL}", f"capturing {MODEL}", "planning", "drawing"]


@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_silences_stages_and_leaves_the_result(flag: str) -> None:
    loud, quiet = (stages("plan", MODEL, "--json", *more) for more in ((), (flag,)))
    assert loud[0]
    assert quiet == ([], loud[1])


def test_steps_of_a_stage_are_no_lines() -> None:
    found, _ = stages("compare", MODEL, "--solvers", "greedy,dp", "--budgets", "0.2,0.5")
    assert found[2:] == ["comparing 4 plans"]


def test_a_stage_that_fails_says_so() -> None:
    found, _ = stages("plan", MODEL, "--budget", "peak:1B", code=1)
    assert found[-1] == "planning, not finished"
