"""Two saved plans side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import remat
from remat.cli import main
from tests.cli.models import BLOCK, folder_with

MODELS = (
    BLOCK
    + """
def blocks():
    return torch.nn.Sequential(*(Block() for _ in range(3))), (torch.randn(64, 16),)

def fewer():
    return torch.nn.Sequential(*(Block() for _ in range(2))), (torch.randn(64, 16),)
"""
)
folder = folder_with("diff_blocks", MODELS)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, [*args, "--quiet"])


@pytest.fixture
def saved(folder: Path) -> tuple[remat.Plan, remat.Plan]:
    for name, budget in (("a", "0.2"), ("b", "0.9")):
        options = ("--budget", budget, "--save", f"{name}.json", "--lower", "eager")
        assert run("plan", "diff_blocks.py:blocks", *options).exit_code == 0
    return remat.Plan.load("a.json"), remat.Plan.load("b.json")


def test_what_one_keeps_and_the_other_does_not(saved: tuple[remat.Plan, remat.Plan]) -> None:
    (one,) = json.loads(run("diff", "a.json", "b.json", "--json").stdout)["graphs"]
    a, b = saved
    assert one["same_graph"] is True
    assert set(one["only_first"]) == set(a.saved) - set(b.saved)
    assert set(one["only_second"]) == set(b.saved) - set(a.saved)
    assert one["only_second"], "a larger budget keeps more"
    for side, plan in (("first", a), ("second", b)):
        for name in (
            "saved_bytes",
            "peak_bytes",
            "without_peak_bytes",
            "recompute_cost",
            "step_cost",
        ):
            assert one[side][name] == getattr(plan, name)


def test_figures_stand_side_by_side(saved: tuple[remat.Plan, remat.Plan]) -> None:
    done = run("diff", "a.json", "b.json")
    assert done.exit_code == 0, done.output
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "0.2" in rows["budget"]
    assert "0.9" in rows["budget"]
    assert "kept in b.json only: " in done.stdout
    assert "different graphs" not in done.stdout
    same = run("diff", "a.json", "a.json").stdout
    assert "kept in a.json only: nothing" in same


def test_plans_of_different_graphs_are_told(saved: tuple[remat.Plan, remat.Plan]) -> None:
    run("plan", "diff_blocks.py:fewer", "--save", "c.json", "--lower", "eager")
    assert "the plans are for different graphs" in run("diff", "a.json", "c.json").stdout


def test_what_is_no_plan_is_an_error(saved: tuple[remat.Plan, remat.Plan]) -> None:
    Path("d.json").write_text("{}")
    done = run("diff", "a.json", "d.json")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: plan 'd.json'"), "the file that it is about"


def test_a_missing_plan_is_wrong_usage(saved: tuple[remat.Plan, remat.Plan]) -> None:
    done = run("diff", "a.json", "missing.json")
    assert done.exit_code == 2
    assert "'missing.json' does not exist" in done.stderr
