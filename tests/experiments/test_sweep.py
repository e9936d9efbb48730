"""Sweeps: the same table whoever answers, whatever dies, however often it is resumed."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import ProblemError, SolverError
from remat.experiments.table import Sweep

#: What differs from run to run.
TIMES = ("plan_s", "solve_s")


def step(width: int = 16) -> Any:
    """What a function gives to be planned."""
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)),
        (torch.randn(8, width),),
        {},
    )


@torch.library.custom_op("remat_sweep::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: 2 * gradient)


class Custom(nn.Module):
    """Saves what a custom operator returns, where that may not run again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(x).sin().sum()


def custom() -> Any:
    return Custom(), (torch.ones(64, requires_grad=True),), {}


def broken() -> Any:
    raise ValueError("no such data")


def leaving() -> Any:
    raise SystemExit(2)


def captured() -> remat.JointGraph:
    model, args, kwargs = step()
    return remat.capture(model, args, kwargs)


def figures(found: Sweep) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(r).items() if k not in TIMES} for r in found.rows]


@cache
def models() -> dict[str, Any]:
    """A function, since processes import this module."""
    return {
        "captured": captured(),
        "function": step,
        "wide": partial(step, 64),
        "broken": broken,
        "gone": leaving,
    }


#: Two budgets, two solvers, and two cost models.
ASKED: dict[str, Any] = {
    "budgets": (0.3, 0.6), "solvers": ("auto", "greedy"), "costs": ("auto", "flops")
}  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Sweep:
    return remat.sweep(models(), **ASKED)


def test_rows_are_those_of_compare_and_failures_have_a_reason(alone: Sweep) -> None:
    assert len(alone.rows) == len(models()) * 2 * 2 * 2
    row = next(r for r in alone.rows if r.key[:4] == ("captured", "flops", "0.6", "greedy"))
    other = remat.compare(models()["captured"], ("greedy",), (0.6,), "flops").rows[0]
    assert (row.saved_bytes, row.recompute_cost, row.peak_bytes) == (
        other.saved_bytes, other.recompute_cost, other.peak_bytes,
    )  # fmt: skip
    failed = [r for r in alone.rows if r.model == "broken"]
    assert {r.reason for r in failed} == {"ValueError: no such data"}
    assert "no such data" in str(alone)
    assert {r.reason for r in alone.rows if r.model == "gone"} == {"SystemExit: 2"}
    assert {r.reason for r in alone.rows if r.model not in ("broken", "gone")} == {None}


def test_solvers_are_compared_by_processes_too(pool: ProcessPoolExecutor) -> None:
    joint = models()["captured"]
    asked = {"solvers": ("auto", "greedy", "dp"), "budgets": (0.3, "peak:0.5", "peak:0", 1)}
    ours, theirs = (remat.compare(joint, **asked, executor=e) for e in (None, pool))
    mine, same = (
        [replace(r, plan_s=None, solve_s=None) for r in found.rows] for found in (ours, theirs)
    )
    assert mine == same
    assert (theirs.cost, theirs.without) == (ours.cost, ours.without)
    with pytest.raises(ProblemError, match="give its name"):
        remat.compare(joint, solvers=(remat.Solver(),), executor=1)


def test_processes_come_to_the_same_by_what_is_declared_here(
    alone: Sweep, pool: ProcessPoolExecutor
) -> None:
    unknown = remat.sweep({"custom": custom}, budgets=0.0)
    remat.declare_pure(twice)
    try:
        here = remat.sweep({"custom": custom}, **ASKED)
        there = remat.sweep({**models(), "custom": custom}, **ASKED, executor=pool)
    finally:
        remat.undeclare_pure(twice)
    assert unknown.rows[0].saved_bytes == 256, "what may not run again is saved"
    assert {r.saved_bytes for r in here.rows} == {0}
    assert figures(there) == [*figures(alone), *figures(here)]


@pytest.mark.filterwarnings("ignore")
def test_dask_comes_to_the_same_although_a_worker_dies(alone: Sweep) -> None:
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        seen: list[Any] = []

        def on_row(row: Any) -> None:
            if not seen:  # one of the two goes while there is work left
                client.retire_workers([next(iter(client.scheduler_info()["workers"]))])
            seen.append(row.key)

        found = remat.sweep(models(), **ASKED, executor=client.get_executor(), on_row=on_row)
    assert figures(found) == figures(alone)
    assert len(seen) == len(set(seen)) == len(found.rows)


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_tables_read_back(alone: Sweep, tmp_path: Path, suffix: str) -> None:
    path = alone.save(tmp_path / f"table{suffix}")
    assert Sweep.load(path) == alone


def test_figures_are_those_of_the_function_as_it_is_now() -> None:
    """A function that is called the same may return another step, in the next sweep or in this one."""

    class Sized:
        def __init__(self, width: int) -> None:
            self.width = width

        def __call__(self) -> Any:
            return step(self.width)

        def __repr__(self) -> str:
            return "Sized()"

    def saved(**models: Sized) -> list[int | None]:
        return [r.saved_bytes for r in remat.sweep(models, budgets=1, solvers="greedy").rows]

    model = Sized(16)
    first = saved(m=model)
    model.width = 64
    second = saved(m=model)
    assert first < second
    assert saved(a=Sized(16), b=model) == [*first, *second]


def test_what_is_known_is_not_asked_again(tmp_path: Path) -> None:
    path, asked = tmp_path / "table.csv", []
    first = remat.sweep(models(), budgets=0.3, output=path, on_row=asked.append)
    assert len(asked) == len(first.rows) == 5
    second = remat.sweep(models(), budgets=(0.3, 0.6), output=path, on_row=asked.append)
    assert len(asked) == 10
    assert [r for r in second.rows if r.budget == "0.3"] == list(first.rows)
    assert not path.with_name("table.csv.partial").exists()
    assert len(remat.sweep(models(), budgets=0.6, output=path).rows) == 5
    assert len(Sweep.load(path).rows) == 10, "what was known before stays in the table"


def test_killed_interrupted_and_resumed_it_is_as_if_undisturbed(
    alone: Sweep, tmp_path: Path
) -> None:
    output = tmp_path / "resumed.json"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as dying, pytest.raises(BrokenProcessPool):
        dying.submit(sweep_and_die, output, 4).result()
    with (tmp_path / "resumed.json.partial").open("a") as file:
        file.write('{"model": "cut o')  # as if it died while it wrote
    asked: list[Any] = []

    def fifth(row: Any) -> None:
        asked.append(row)
        if len(asked) == 5:
            raise KeyboardInterrupt

    sweep = partial(remat.sweep, models(), **ASKED)
    with pytest.raises(KeyboardInterrupt):
        sweep(output=output, on_row=fifth)
    sweep(output=output, on_row=asked.append)
    assert len(asked) == 40 - 4
    assert figures(Sweep.load(output)) == figures(alone)


def sweep_and_die(output: Path, rows: int) -> None:
    """A sweep whose process is gone after a number of rows."""
    asked: list[Any] = []

    def on_row(row: Any) -> None:
        asked.append(row)
        if len(asked) == rows:
            os._exit(9)

    remat.sweep(models(), **ASKED, output=output, on_row=on_row)


def test_figures_are_those_of_the_question(tmp_path: Path) -> None:
    """Not of another lowering, another graph of the same name, or another time limit."""
    path = tmp_path / "table.json"
    given: dict[str, Any] = {"budgets": 0.5, "output": path}
    inductor = remat.sweep({"m": step}, **given)
    eager = remat.sweep({"m": step}, lower="eager", **given)
    assert eager.rows[0].of != inductor.rows[0].of
    assert figures(eager) == figures(remat.sweep({"m": step}, budgets=0.5, lower="eager"))
    joints = [remat.capture(*step(width)[:2]) for width in (16, 32)]
    small, large = (remat.sweep({"j": joint}, **given).rows[0] for joint in joints)
    assert small.recompute_cost != large.recompute_cost
    assert remat.sweep({"j": joints[0]}, time_limit=5.0, **given).rows[0].of != small.of
    assert len(Sweep.load(path).rows) == 5


def test_an_output_is_one_sweep_s(tmp_path: Path) -> None:
    path = tmp_path / "table.json"

    def second(row: Any) -> None:
        with pytest.raises(ProblemError, match="another sweep is writing"):
            remat.sweep({"other": step}, budgets=0.5, output=path)

    remat.sweep({"m": step}, budgets=0.5, output=path, on_row=second)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table.json"]


@pytest.mark.parametrize("line", ["5", "NaN", "[" * 5000, "{}", '{"model": 1}'])
def test_a_damaged_journal_is_read_up_to_the_damage(tmp_path: Path, line: str) -> None:
    path = tmp_path / "table.json"
    sweep = partial(remat.sweep, {"m": step, "n": step}, budgets=0.5, output=path)
    with pytest.raises(KeyboardInterrupt):
        sweep(on_row=interrupted)
    journal = path.with_name("table.json.partial")
    assert len(journal.read_text().splitlines()) == 2
    journal.write_text(journal.read_text() + line + "\n")
    asked: list[Any] = []
    assert len(sweep(on_row=asked.append).rows) == 2
    assert [r.model for r in asked] == ["n"]


def interrupted(row: Any) -> None:
    raise KeyboardInterrupt


def test_files_of_another_version_are_refused(alone: Sweep, tmp_path: Path) -> None:
    path = alone.save(tmp_path / "table.json")
    path.write_text(path.read_text().replace('"remat_sweep": 2', '"remat_sweep": 1'))
    with pytest.raises(ProblemError, match="no sweep of version 2"):
        remat.sweep(models(), budgets=0.3, output=path)
    table = tmp_path / "table.csv"
    table.write_text("model,cost,price\na,b,1\n")
    with pytest.raises(ProblemError, match="of another version of remat"):
        Sweep.load(table)
    partial_file = tmp_path / "other.csv.partial"
    partial_file.write_text(json.dumps({"remat_sweep": 2, "remat": "0.0.1", "torch": "1.0"}) + "\n")
    with pytest.raises(ProblemError, match="written by other versions"):
        remat.sweep(models(), budgets=0.3, output=tmp_path / "other.csv")


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"models": {}}, ProblemError, "at least one"),
        ({"models": [captured]}, ProblemError, "expected a dict"),
        ({"models": {"m": nn.Linear(2, 2)}}, ProblemError, "model 'm' is a Linear"),
        (
            {"models": {"m": lambda: step()}, "executor": 2},
            ProblemError,
            "cannot be sent to the executor",
        ),
        ({"solvers": "nobody"}, SolverError, "nobody"),
        ({"costs": "free"}, ProblemError, "free"),
        ({"budgets": "much"}, ProblemError, "much"),
        ({"output": "table.xlsx"}, ProblemError, r"must end in \.json, \.csv or \.parquet"),
        ({"executor": "dask"}, ProblemError, "client"),
    ],
)
def test_bad_input_is_told_before_anything_is_planned(given: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        remat.sweep(**{"models": {"m": broken}, **given}, on_row=lambda row: pytest.fail("asked"))
