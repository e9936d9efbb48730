"""The command ``remat compare``: solvers side by side on one step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from remat.cli import main
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
    options = ("--solvers", "greedy,cpsat", "--budgets", "0.1,1GiB")
    done = run("compare", MODEL, "--json", *options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(r["solver"], r["budget"]) for r in rows] == [
        (s, b) for b in ("0.1", f"{2**30}B") for s in ("greedy", "cpsat")
    ]
    shown = run("compare", MODEL, *options)
    assert shown.exit_code == 0
    assert "1 GiB" in shown.stdout
    assert sum(" * " in line for line in shown.stdout.splitlines()) >= 2
    assert "* least recompute cost of these solvers at the budget" in shown.stdout
    assert "gap: at most this much" in shown.stdout


def test_a_solver_can_be_a_class_in_the_current_folder(folder: Path) -> None:
    (folder / "compared_blocks_too.py").write_text(
        "import remat\n"
        "class Nothing(remat.Solver):\n"
        "    'Saves nothing.'\n"
        "    name = 'nothing'\n"
        "    def solve(self, problem, **kwargs):\n"
        "        return []\n"
    )
    options = ("--solvers", "compared_blocks_too:Nothing", "--budgets", "0.1", "--json")
    done = run("compare", MODEL, *options)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][0]["solver"] == "compared_blocks_too:Nothing"


def test_compare_fails_if_nobody_finds_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.solvers.greedy import Greedy

    monkeypatch.setattr(Greedy, "cannot_run", classmethod(lambda _: "it is closed today"))
    done = run("compare", MODEL, "--solvers", "greedy", "--budgets", "0.1")
    assert done.exit_code == 1
    assert "closed today" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: no solver found a plan")
