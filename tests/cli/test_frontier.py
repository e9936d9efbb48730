"""The commands that show many plans: `remat frontier`, and the table of `remat compare`."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import remat
from remat.cli import main, models, tables
from remat.errors import SolverError
from remat.planning.experiment_table import Comparison, ExperimentRow
from remat.plugins.registry import registry
from remat.units import Budget, format_bytes
from tests.cli.models import BLOCK, folder_with

MODELS = BLOCK + '''
def blocks(depth=4):
    with torch.device("meta"):
        return torch.nn.Sequential(*(Block() for _ in range(depth))), (torch.zeros(512, 16),)

def block():
    return blocks(depth=1)

'''  # fmt: skip
MODEL = "some_blocks.py:blocks"
SMALL = "some_blocks.py:block"
folder = folder_with("some_blocks", MODELS)


def run(*args: str) -> Result:
    """A command that does not tell its stages; what it tells of them has tests of its own."""
    return CliRunner().invoke(main, [*args, "--quiet"])


def frontier(*args: str, model: str = MODEL) -> Result:
    return run("frontier", model, "--lower", "eager", *args)


@cache
def library(solver: str) -> Any:
    example = models.load(MODEL)
    joint = remat.capture(example.model, example.args, lower="eager")
    return remat.frontier(joint, solver)


class Fails(remat.Solver):
    """Fails at every problem."""

    name: ClassVar[str] = "fails"

    def solve(self, problem: Any, **kwargs: Any) -> list[int]:
        raise SolverError("fails", "it always\nfails")


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
    done = frontier("--solvers", "greedy,lagrangian", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert [f["solver"] for f in data["frontiers"]] == ["greedy", "lagrangian"]
    assert (data["failed"], data["plan"]) == ({}, None)
    for given in data["frontiers"]:
        expected = library(given["solver"])
        knee = given.pop("knee")
        assert given == json.loads(expected.to_json())
        assert knee == {
            name: getattr(expected.knee(), name)
            for name in ("saved_bytes", "recompute_cost", "peak_bytes")
        }


def test_by_peak_the_table_begins_with_it_and_says_how_low_it_can_be() -> None:
    done = frontier("--by", "peak", model=SMALL)
    assert done.exit_code == 0, done.output
    example = models.load(SMALL)
    found = remat.frontier(remat.capture(example.model, example.args, lower="eager"), by="peak")
    assert f"every schedule has {format_bytes(found.bound[0][0])} alive" in done.stdout
    (knee,) = (line for line in done.stdout.splitlines() if "← knee" in line)
    assert knee.lstrip().startswith(format_bytes(found.knee().peak_bytes))
    assert re.search(r"peak +recompute +saved", done.stdout)
    (given,) = json.loads(frontier("--by", "peak", "--json", model=SMALL).stdout)["frontiers"]
    del given["knee"]
    assert given == json.loads(found.to_json())


def test_a_chosen_plan_is_marked_by_its_peak(folder: Path) -> None:
    options = ("--by", "peak", "--solvers", "greedy,lagrangian", "--plot", "out.svg")
    done = frontier(*options, "--budget", "peak:0.5")
    assert done.exit_code == 0, done.output
    assert (folder / "out.svg").exists()
    assert "budget peak 0.5: " in done.stdout


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_of_all_solvers_and_the_chosen_plan(folder: Path, suffix: str) -> None:
    target = folder / f"out{suffix}"
    options = ("--solvers", "greedy,lagrangian", "--plot", target.name)
    assert frontier(*options, model=SMALL).exit_code == 0
    plain = target.read_bytes()
    done = frontier(*options, "--budget", "0.3", model=SMALL)
    assert done.exit_code == 0, done.output
    assert f"drawn: {target.name}" in done.stdout
    assert "budget 0.3: " in done.stdout
    assert target.read_bytes() != plain
    assert not list(folder.glob(".*part"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--plot", "out.pdf"), "expected .svg or .png"),
        (("--plot", "nowhere/out.svg"), "there is no folder"),
        (("--solvers", "greedy,gredy"), "did you mean 'greedy'?"),
        (("--budget", "peak:lots"), "expected bytes"),
    ],
)
def test_wrong_usage_is_told_before_any_work(args: tuple[str, ...], says: str) -> None:
    done = frontier(*args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert "some_blocks" not in sys.modules


def test_a_solver_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_solvers", sys.modules[__name__])
    both = frontier("--solvers", "some_solvers:Fails,greedy")
    assert both.exit_code == 0, both.output
    assert "fails: no frontier: " in both.stdout
    assert "it always fails" in both.stdout
    assert "greedy: " in both.stdout
    alone = frontier("--solvers", "some_solvers:Fails")
    assert alone.exit_code == 1
    assert "it always fails" in alone.stderr


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 20, 1000])
def test_thinning_keeps_the_ends_and_the_knee(rows: int) -> None:
    found = library("lagrangian")
    kept = found.thinned(rows)
    assert len(kept) <= max(3, rows)
    assert {found.points[0], found.points[-1], found.knee()} <= set(kept)
    assert kept == [p for p in found.points if p in kept]
    if rows >= len(found.points):
        assert kept == list(found.points)


def test_compare_has_knapsack_and_graph_solvers_in_one_table() -> None:
    solvers = ("greedy", "dp", "lagrangian", "auto")
    budgets = ("0.3", "1GiB", "saved:200kB")
    options = ("--solvers", ",".join(solvers), "--budgets", ",".join(budgets))
    done = run("compare", MODEL, "--lower", "eager", *options)
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    for budget in budgets:
        start = lines.index(f"budget {Budget.parse(budget).label}")
        block = lines[start + 1 : start + 1 + len(solvers)]
        assert [line.split()[0] for line in block] == list(solvers)
        assert any(" * " in line for line in block)
    assert "min-cut" not in done.stdout, "one objective at every budget: the solvers decided"
    data = json.loads(run("compare", MODEL, "--lower", "eager", *options, "--json").stdout)
    for row in data["rows"]:
        if row["budget"].startswith("peak:"):
            assert row["gap"] is None
            assert row["peak_bytes"] <= 2**30
        else:
            share = 1 - row["recompute_bound"] / row["recompute_cost"]
            assert row["gap"] == pytest.approx(share)


def test_a_plan_that_peaks_higher_is_told_in_one_line() -> None:
    done = run("plan", MODEL, "--lower", "eager", "--budget", "0", "--json")
    assert done.exit_code == 0, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: budget 0 for ")
    assert "as text peak:0.00" in line
    within = run("plan", MODEL, "--lower", "eager", "--budget", "peak:0.00", "--json")
    assert within.exit_code == 0, within.output
    assert within.stderr == ""
    peaks = [json.loads(shown.stdout)["peak_bytes"] for shown in (within, done)]
    assert peaks[0] < peaks[1]


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


def test_the_table_of_compare_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*registry().solvers, "some_module_with_a_long_name:SolverClass"]
    rows = [row(n, budget=b) for b in ("0.3", f"peak:{2**40 - 2**30}B") for n in names]
    rows.append(ExperimentRow(solver="greedy", budget="saved:2B", reason="because\n" * 40))
    comparison = Comparison(graph="g", cost="flops", rows=tuple(rows))
    out = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    out.print(tables.comparison_table(comparison, "a title"))
    assert isinstance(out.file, io.StringIO)
    lines = [line.rstrip() for line in out.file.getvalue().splitlines()]
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in out.file.getvalue()
    for name in registry().solvers:
        whole = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(whole) >= 2
        for figure in ("1023 GiB", "999.9 GFLOP *", "99.99 s"):
            assert all(figure in line for line in whole[:2])
    (note,) = tables.comparison_notes(comparison)
    assert note.startswith("greedy: no plan at 2 B saved: because because")


def test_the_gap_of_a_row() -> None:
    given = {"budget": "0.5", "recompute_cost": 80, "recompute_bound": 60}
    assert row("a", **given).gap == pytest.approx(0.25)
    assert row("a", **given | {"recompute_cost": 0, "recompute_bound": 0}).gap == 0
    assert row("a", **given | {"budget": "peak:5B"}).gap is None
    assert ExperimentRow(solver="a", budget="0.5", reason="none").gap is None


def test_the_winner_is_marked_in_text_too() -> None:
    rows = (row("good", budget="0.5"), row("bad", budget="0.5", best=False), row("peaky"))
    text = str(Comparison(graph="g", cost="flops", rows=rows)).splitlines()
    assert [" * " in line for line in text] == [False, True, False, True]
    assert "100.0%" in text[1]
    assert "peak 1023 GiB" in text[3]
    assert len({len(line) for line in text}) == 1, "columns stand in line"
