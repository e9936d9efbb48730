"""The commands that show many plans: `remat frontier`, and the table of `remat compare`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import remat
from remat.cli import models
from remat.experiments.table import Comparison, ExperimentRow
from remat.plugins.registry import registry
from remat.units import format_bytes
from tests.cli.command import run, shown

MODELS = '''
from remat.errors import SolverError
from remat import Solver

class Fails(Solver):
    """Fails at every problem."""
    name = "fails"
    def solve(self, problem, **kwargs):
        raise SolverError("fails", "it always\\nfails")
'''  # fmt: skip
MODEL, SMALL = "nets.py:blocks", "nets.py:block"


def frontier(*args: str, model: str = MODEL) -> Result:
    return run("frontier", model, "--lower", "eager", *args)


@cache
def library(solver: str, by: Any = "saved", model: str = MODEL) -> Any:
    example = models.load(model)
    joint = remat.capture(example.model, example.args, lower="eager")
    return remat.frontier(joint, solver, by=by)


def test_the_table_has_the_points_that_the_library_gives() -> None:
    done = frontier("--solvers", "greedy")
    assert done.exit_code == 0, done.output
    found = library("greedy")
    rows = [line for line in done.stdout.splitlines() if re.match(r"\d\.\d{3} ", line)]
    assert len(rows) == len(found.thinned(20))
    (knee,) = (row for row in rows if "← knee" in row)
    share = found.knee().saved_bytes / found.full_bytes
    assert knee.startswith(f"{share:.3f}")
    assert f"greedy: {len(found.points)} points" in done.stdout


def test_json_has_all_points_and_the_knee() -> None:
    data = json.loads(frontier("--solvers", "greedy,lagrangian", "--json").stdout)
    assert [f["solver"] for f in data["frontiers"]] == ["greedy", "lagrangian"]
    assert data["failed"] == {}
    for given in data["frontiers"]:
        expected = library(given["solver"])
        knee = given.pop("knee")
        assert given == json.loads(expected.to_json())
        assert knee == {
            name: getattr(expected.knee(), name)
            for name in ("saved_bytes", "recompute_cost", "peak_bytes")
        }


def test_by_peak_the_table_begins_with_it_and_says_how_low_it_can_be() -> None:
    options = ("--by", "peak", "--solvers", "greedy")
    done = frontier(*options, model=SMALL)
    assert done.exit_code == 0, done.output
    found = library("greedy", "peak", SMALL)
    assert f"every schedule has a peak of at least {format_bytes(found.bound[0][0])}" in done.stdout
    (knee,) = (line for line in done.stdout.splitlines() if "← knee" in line)
    assert knee.lstrip().startswith(format_bytes(found.knee().peak_bytes))
    assert re.search(r"peak bytes +recompute cost +saved bytes", done.stdout)
    (given,) = json.loads(frontier(*options, "--json", model=SMALL).stdout)["frontiers"]
    del given["knee"]
    assert given == json.loads(found.to_json())


@pytest.mark.parametrize(("suffix", "options"), [(".png", ()), (".svg", ("--by", "peak"))])
def test_a_picture_of_all_solvers(folder: Path, suffix: str, options: tuple[str, ...]) -> None:
    target = folder / f"out{suffix}"
    done = frontier(*options, "--solvers", "greedy,lagrangian", "--plot", target.name, model=SMALL)
    assert done.exit_code == 0, done.output
    assert f"drawn: {target.name}" in done.stdout
    drawn = target.read_bytes()
    if suffix == ".svg":
        assert all(name in drawn.decode() for name in ("greedy", "lagrangian", "knee at"))
    assert not list(folder.glob(".*part"))


def test_a_solver_that_fails_leaves_the_others() -> None:
    both = frontier("--solvers", "nets:Fails,greedy")
    assert both.exit_code == 0, both.output
    for part in ("fails: no frontier: ", "it always fails", "greedy: "):
        assert part in both.stdout
    alone = frontier("--solvers", "nets:Fails")
    assert alone.exit_code == 1
    assert "it always fails" in alone.stderr


@pytest.mark.parametrize("rows", [1, 4, 20, 1000])
def test_thinning_keeps_the_ends_and_the_knee(rows: int) -> None:
    found = library("lagrangian")
    kept = found.thinned(rows)
    assert len(kept) <= max(3, rows)
    assert {found.points[0], found.points[-1], found.knee()} <= set(kept)
    assert kept == [p for p in found.points if p in kept]
    if rows >= len(found.points):
        assert kept == list(found.points)


def test_a_plan_that_peaks_higher_is_told_in_one_line() -> None:
    asked = ("plan", MODEL, "--lower", "eager", "--json", "--budget")
    done = run(*asked, "0")
    assert done.exit_code == 0, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: budget 0 for ")
    assert "as text peak:0.00" in line
    within = json.loads(shown(*asked, "peak:0.00"))
    assert within["peak_bytes"] < json.loads(done.stdout)["peak_bytes"]


def row(solver: str, **fields: Any) -> ExperimentRow:
    """A row with figures as wide as they get."""
    wide: dict[str, Any] = {
        "budget": f"peak:{2**40 - 2**30}B",
        "decided_by": solver,
        "saved_bytes": 1023 * 2**30,
        "recompute_cost": 999_900_000_000,
        "recompute_bound": 0,
        "peak_bytes": 1023 * 2**30,
        "solve_s": 99.99,
        "plan_s": 1000.0,
        "unit": "FLOP",
        "best": True,
    }
    return ExperimentRow(solver=solver, **wide | fields)


def test_the_table_of_compare_names_each_solver_and_cuts_nothing() -> None:
    names = [*registry().solvers, "some_module_with_a_long_name:SolverClass"]
    rows = [row(n, budget=b) for b in ("0.3", f"peak:{2**40 - 2**30}B") for n in names]
    rows.append(ExperimentRow(solver="greedy", budget="saved:2B", reason="because " * 40))
    lines = str(Comparison(graph="g", cost="flops", rows=tuple(rows))).splitlines()
    for name in names:
        whole = [line for line in lines if f"  {name}  " in line]
        assert len(whole) == 2 + (name == "greedy")
        for figure in ("1023 GiB", "999.9 GFLOP  *", "99.99 s"):
            assert all(figure in line for line in whole[:2])
    assert lines[-1].startswith("2 B saved greedy: no plan: because")
    assert lines[-1].count("because") == 40


def test_the_gap_of_a_row() -> None:
    given = {"budget": "0.5", "recompute_cost": 80, "recompute_bound": 60}
    assert row("a", **given).gap == pytest.approx(0.25)
    assert row("a", **given | {"recompute_cost": 0, "recompute_bound": 0}).gap == 0
    assert ExperimentRow(solver="a", budget="0.5", reason="none").gap is None


def test_the_winner_is_marked_in_text_too() -> None:
    rows = (row("good", budget="0.5"), row("bad", budget="0.5", best=False), row("peaky"))
    text = str(Comparison(graph="g", cost="flops", rows=rows)).splitlines()
    assert [" * " in line for line in text] == [False, True, False, True]
    assert "100.0%" in text[1]
    assert "peak 1023 GiB" in text[3]
    assert len({len(line) for line in text}) == 1, "columns stand in line"
