"""The command ``remat compare``: solvers side by side on one step."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.experiments import grid as experiments
from remat.solvers.brief import PARTS
from remat.units import Budget
from tests.cli.command import run, shown, told

MODEL = "nets.py:blocks"
#: A module that brings no torch to the process in which its solver runs.
IDLE = '''
import remat

class Nothing(remat.Solver):
    """Saves nothing."""
    name = "nothing"
    def solve(self, problem, **kwargs):
        return []
'''  # fmt: skip


def test_compare_has_a_row_for_each_solver_and_budget() -> None:
    """Solvers of knapsacks and of graphs in one table."""
    solvers, budgets = ("greedy", "dp", "cpsat", "auto"), ("0.3", "1GiB", "saved:200kB")
    asked = ("compare", MODEL, "--lower", "eager", "--solvers", ",".join(solvers))
    asked = (*asked, "--budgets", ",".join(budgets))
    data = told(*asked)["rows"]
    assert [(r["solver"], r["budget"]) for r in data] == [
        (s, b) for b in ("0.3", f"peak:{2**30}B", "saved:200000B") for s in solvers
    ]
    for row in data:
        if row["budget"].startswith("peak:"):
            assert row["gap"] is None
            assert row["peak_bytes"] <= 2**30
        else:
            share = 1 - row["recompute_bound"] / row["recompute_cost"]
            assert row["gap"] == pytest.approx(share)
    lines = shown(*asked).splitlines()
    for budget in budgets:
        label = Budget.parse(budget).label
        block = [line for line in lines if line.lstrip().startswith(f"{label}  ")]
        assert [line.lstrip().removeprefix(label).split()[0] for line in block] == list(solvers)
        assert any(" * " in line for line in block)
    assert {row["decided_by"] for row in data}.isdisjoint({"min-cut"}), "the solvers decided"


def test_a_solver_can_be_a_class_in_the_current_folder(folder: Path) -> None:
    (folder / "idle.py").write_text(IDLE)
    options = ("--solvers", "idle:Nothing", "--budgets", "0.1", "--lower", "eager")
    text = shown("compare", MODEL, *options)
    assert "idle:Nothing" in text


def test_compare_fails_if_nobody_finds_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.solvers.knapsack.greedy import Greedy

    monkeypatch.setattr(Greedy, "cannot_run", classmethod(lambda _: "it is closed today"))
    asked = ("compare", MODEL, "--lower", "eager", "--solvers", "greedy", "--budgets", "0.1")
    done = run(*asked)
    assert done.exit_code == 1
    assert "closed today" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: no solver found a plan")
    found = json.loads(run(*asked, "--json").stdout)
    assert found["error"]["kind"] == "RematError"
    assert "closed today" in found["rows"][0]["reason"], "what was found stands beside the error"


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
    question = ("compare", MODEL, "--lower", "eager", "--budgets", "0.1")
    text = shown(*question)
    slow = ("milp", "pulp", "cpsat", "lagrangian", "graph-milp")
    names = [s if isinstance(s, str) else s.name for s in asked]
    assert names == list(remat.solver_names())
    brief = [s for s in asked if not isinstance(s, str)]
    assert {s.name for s in brief} == {*slow}.intersection(names)
    for solver in brief:
        whole = type(solver)()
        limits = [f.name for f in fields(whole) if f.name in ("work", "nodes", "clock_s")]
        assert [PARTS * getattr(solver, f) for f in limits] == [getattr(whole, f) for f in limits]
    (note,) = (line for line in text.splitlines() if "a twentieth of their work" in line)
    assert note.startswith(", ".join(s.name for s in brief) + ": ")
    assert told(*question)["brief"] == [s.name for s in brief]


@pytest.mark.parametrize("options", [("--solvers", "cpsat,greedy"), ("--time-limit", "5")])
def test_solvers_that_are_named_or_timed_do_all_of_their_work(
    asked: list[Any], options: tuple[str, ...]
) -> None:
    question = ("compare", MODEL, "--lower", "eager", "--budgets", "0.1")
    assert "a twentieth" not in shown(*question, *options)
    assert "cpsat" in asked
    assert all(isinstance(solver, str) for solver in asked)
