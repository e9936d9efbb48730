"""``remat sweep``: models by name, in processes, into a table that is gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from remat.cli import main
from remat.experiments.table import Sweep

MODEL, FAILING = "nets.py:block", "nets.py:broken"
MODELS = '''
def broken():
    raise RuntimeError("no such luck")
'''  # fmt: skip


def test_a_sweep_writes_its_table_and_goes_on_from_it(tmp_path: Path) -> None:
    output = tmp_path / "table.csv"
    command = ["sweep", MODEL, FAILING, "--solvers", "auto,greedy", "-o", str(output)]
    done = CliRunner().invoke(main, [*command, "--budgets", "0.5"])
    assert done.exit_code == 0, done.output
    assert "no such luck" in done.stdout, "a model that cannot be built is a row with the reason"
    assert "2 of 4 rows have no plan" in done.stdout
    assert f"written to {output}" in done.stdout
    assert "planning 4 rows\n" in done.stderr
    again = CliRunner().invoke(main, [*command, "--budgets", "0.5,0.3", "--json"])
    assert again.exit_code == 0, again.output
    assert f"planning 4 rows; 4 rows taken from {output}" in again.stderr
    rows = [r for r in json.loads(again.stdout)["rows"] if r["model"] == MODEL]
    assert [(r["budget"], r["solver"]) for r in rows] == [
        (budget, solver) for budget in ("0.5", "0.3") for solver in ("auto", "greedy")
    ]
    for row in rows:
        assert row["cost"] == "auto"
        assert row["priced"] == "roofline-fused:epyc"
        assert row["without_step_cost"] > row["recompute_cost"]
        assert row["without_peak_bytes"] > 0
    table = Sweep.load(tmp_path / "table.csv.jsonl").rows
    assert len(table) == 8
    assert table[0].without_peak_bytes == rows[0]["without_peak_bytes"]
    assert rows[0]["of"] == f"{MODEL} for inductor"
    whole = CliRunner().invoke(main, [*command, "--budgets", "0.5,0.3,0.4", "--solvers", "greedy"])
    assert f"planning 2 rows; 4 rows taken from {output}" in whole.stderr
    assert f"written to {output}; 4 rows taken from {output}" in whole.stdout


@pytest.mark.parametrize("model", ["nets.py:missing", "hf:lama", "nothing"])
def test_a_misspelled_model_is_wrong_usage_before_anything_is_planned(model: str) -> None:
    done = CliRunner().invoke(main, ["sweep", MODEL, model])
    assert done.exit_code == 2
    assert model.removeprefix("nets.py:") in done.stderr
    assert "planning" not in done.stderr


def test_where_no_row_has_a_plan_the_command_fails() -> None:
    done = CliRunner().invoke(main, ["sweep", FAILING])
    assert done.exit_code == 1
    assert "3 of 3 rows have no plan" in done.stdout
