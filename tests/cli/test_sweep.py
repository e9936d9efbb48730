"""``remat sweep``: models by name, in processes, into a table that is gone on with."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from remat.cli import main
from remat.planning.sweep_table import Sweep

MODEL = "examples/models.py:gpt"


def test_a_sweep_writes_its_table_and_goes_on_from_it(tmp_path: Path) -> None:
    output = tmp_path / "table.csv"
    command = [
        "sweep",
        MODEL,
        "examples/models.py:missing",
        "--solvers",
        "auto,greedy",
        "-o",
        str(output),
    ]
    done = CliRunner().invoke(main, [*command, "--budgets", "0.5"])
    assert done.exit_code == 0, done.output
    assert "has no 'missing'" in done.stdout, (
        "a model that cannot be built is a row with the reason"
    )
    assert f"written to {output}" in done.stdout
    assert "planning 4 rows" in done.stderr
    again = CliRunner().invoke(main, [*command, "--budgets", "0.5,0.3", "--jobs", "2", "--json"])
    assert again.exit_code == 0, again.output
    rows = json.loads(again.stdout)["rows"]
    assert [(r["model"], r["budget"], r["solver"]) for r in rows if r["model"] == MODEL] == [
        (MODEL, budget, solver) for budget in ("0.5", "0.3") for solver in ("auto", "greedy")
    ]
    assert len(Sweep.load(output).rows) == 8


def test_what_cannot_be_meant_is_told_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["sweep", MODEL, "-o", str(tmp_path / "table.xlsx")])
    assert done.exit_code == 1
    assert "must end in .json, .csv or .parquet" in done.stderr
    assert CliRunner().invoke(main, ["sweep", MODEL, "--jobs", "0"]).exit_code == 2
