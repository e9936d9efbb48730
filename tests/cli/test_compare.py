"""The command ``remat compare``: solvers side by side on one step."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import remat
from remat.cli import main
from remat.planning import experiments
from remat.solvers.brief import PARTS
from tests.cli.models import BLOCK, folder_with

MODELS = BLOCK + '''
def blocks():
    return torch.nn.Sequential(Block(), Block()), (torch.randn(64, 16),)
'''  # fmt: skip
MODEL = "compared_blocks.py:blocks"
folder = folder_with("compared_blocks", MODELS)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, [*args, "--quiet"])


def test_compare_gives_a_row_for_each_solver_and_budget() -> None:
    options = ("--solvers", "greedy,cpsat", "--budgets", "0.1,1GiB,saved:1MB")
    done = run("compare", MODEL, "--json", *options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(r["solver"], r["budget"]) for r in rows] == [
        (s, b) for b in ("0.1", f"peak:{2**30}B", "saved:1000000B") for s in ("greedy", "cpsat")
    ]
    shown = run("compare", MODEL, *options)
    assert shown.exit_code == 0
    assert "budget peak 1 GiB" in shown.stdout
    assert "budget 977 KiB saved" in shown.stdout
    assert sum(" * " in line for line in shown.stdout.splitlines()) >= 2
    assert "gap: the cost above the proven lower bound" not in shown.stdout
    legend = run("compare", MODEL, *options, "--legend").stdout
    assert "* least recompute cost of these solvers at the budget" in legend
    assert "gap: the cost above the proven lower bound" in legend


def test_a_solver_can_be_a_class_in_the_current_folder(folder: Path) -> None:
    (folder / "compared_blocks_too.py").write_text(
        "import remat\n"
        "class Nothing(remat.Solver):\n"
        "    'Saves nothing.'\n"
        "    name = 'nothing'\n"
        "    def solve(self, problem, **kwargs):\n"
        "        return []\n"
    )
    options = ("--solvers", "compared_blocks_too:Nothing", "--budgets", "0.1")
    assert "costs less than the solver's plan" not in run("compare", MODEL, *options).stdout
    done = run("compare", MODEL, *options, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][0]["solver"] == "compared_blocks_too:Nothing"


def test_compare_fails_if_nobody_finds_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.solvers.greedy import Greedy

    monkeypatch.setattr(Greedy, "cannot_run", classmethod(lambda _: "it is closed today"))
    done = run("compare", MODEL, "--solvers", "greedy", "--budgets", "0.1")
    assert done.exit_code == 1
    assert "closed today" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: no solver found a plan")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The solvers that the command has asked for, once it has run; nobody is asked but `greedy`."""
    found: list[Any] = []
    real = experiments.compare

    def compare(joint: Any, solvers: Any, *args: Any, **options: Any) -> Any:
        found.extend(solvers)
        return real(joint, ("greedy",), *args, **options)

    monkeypatch.setattr(experiments, "compare", compare)
    return found


def test_all_solvers_stand_side_by_side_with_the_slow_ones_in_brief(asked: list[Any]) -> None:
    done = run("compare", MODEL, "--budgets", "0.1")
    assert done.exit_code == 0, done.output
    slow = ("milp", "pulp", "cpsat", "lagrangian", "graph-milp")
    names = [s if isinstance(s, str) else s.name for s in asked]
    assert names == list(remat.solver_names())
    brief = [s for s in asked if not isinstance(s, str)]
    assert {s.name for s in brief} == {*slow}.intersection(names)
    for solver in brief:
        whole = type(solver)()
        limits = [f.name for f in fields(whole) if f.name in ("work", "nodes", "clock_s")]
        assert [PARTS * getattr(solver, f) for f in limits] == [getattr(whole, f) for f in limits]
    (note,) = (line for line in done.stdout.splitlines() if "a twentieth of their work" in line)
    assert note.startswith(", ".join(s.name for s in brief) + ": ")
    told = json.loads(run("compare", MODEL, "--budgets", "0.1", "--json").stdout)
    assert told["brief"] == [s.name for s in brief]


@pytest.mark.parametrize("options", [("--solvers", "cpsat,greedy"), ("--time-limit", "5")])
def test_solvers_that_are_named_or_timed_do_all_of_their_work(
    asked: list[Any], options: tuple[str, ...]
) -> None:
    done = run("compare", MODEL, "--budgets", "0.1", *options)
    assert done.exit_code == 0, done.output
    assert "cpsat" in asked
    assert all(isinstance(solver, str) for solver in asked)
    assert "a twentieth" not in done.stdout
