"""The driver of the benchmarks, and the results that are kept: no benchmark is measured here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, run
from benchmarks.experiment import Case, Experiment, Row, grid, in_process, result_path
from benchmarks.tables import TABLES, Kept


@pytest.mark.parametrize("name", run.MODULES)
def test_kept_results_are_summarised_and_shown(name: str) -> None:
    experiment = run.experiment_of(name)
    assert experiment.name == name
    assert experiment.quick
    record = json.loads(result_path(experiment, quick=False).read_text())
    assert all({"workload", "budget", "side"} <= row.keys() for row in record["rows"])
    again = experiment.summarise(record["rows"])
    shared = again.keys() & record["summary"].keys() - {"solvers", "times", "limits"}
    assert {k: approximate(again[k]) for k in shared} == {
        k: approximate(record["summary"][k]) for k in shared
    }
    for table in experiment.tables:
        assert TABLES[table](Kept({name: record})).count("\n") > 2


def approximate(value: object) -> object:
    """The value with all numbers rounded."""
    if isinstance(value, dict):
        return {key: approximate(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def measure(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    """Counts the cases; the workload "bad" raises after its first row."""
    for case in cases:
        yield case.row(quick=quick, cases=len(cases))
        if name == "bad":
            raise ValueError("no such thing")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    made = Experiment(
        name="counting",
        about="counts",
        cases=grid(("good", "bad", "other"), (0.5, 1.0)),
        quick=grid(("good",), (0.5,)),
        measure=measure,
        summarise=lambda rows: {"rows": len(rows)},
    )
    monkeypatch.setattr(run, "MODULES", {"counting": "counting"})
    monkeypatch.setattr(run, "experiment_of", lambda name: made)
    return made


def test_a_workload_that_raises_is_missing_and_the_others_are_measured(
    counting: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, quick = tmp_path / "found.json", tmp_path / "quick.json"
    assert run.main(["counting", "--json", str(quick), "--quick"]) == 0
    (row,) = json.loads(quick.read_text())["rows"]
    assert (row["workload"], row["quick"], row["cases"]) == ("good", True, 1)
    capsys.readouterr()
    assert run.main(["counting", "--json", str(path)]) == 1
    record = json.loads(path.read_text())
    assert [row["workload"] for row in record["rows"]] == ["good", "good", "other", "other"]
    assert record["summary"] == {"rows": 4}
    said = capsys.readouterr()
    assert "bad: ValueError('no such thing')" in said.err
    lines = [json.loads(line) for line in said.out.splitlines() if line.startswith('{"')]
    assert [line["workload"] for line in lines] == ["good", "good", "bad", "other", "other"]
    assert run.main(["counting", "--json", str(path), "--only", "other", "--budgets", "0.1"]) == 0
    found = [(r["workload"], r["budget"]) for r in json.loads(path.read_text())["rows"]]
    assert found == [("good", 0.5), ("good", 1.0), ("other", 0.1)], "its own rows are replaced"


def test_an_unknown_workload_is_refused_with_those_that_there_are(
    counting: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main(["counting", "--only", "nothing"])
    assert "there is no 'nothing'; known: good, bad, other" in capsys.readouterr().err


def die(name: str) -> Iterator[Row]:
    """Yields a row, and ends its process."""
    yield {"workload": name}
    import os

    os._exit(3)


def test_the_rows_of_a_process_that_dies_are_not_lost() -> None:
    rows = in_process(die, "mine")
    assert next(rows) == {"workload": "mine"}
    with pytest.raises(RuntimeError, match="status 3"):
        next(rows)


def hang(name: str) -> Iterator[Row]:
    """Yields a row, and then nothing more."""
    yield {"workload": name}
    threading.Event().wait()


def test_a_process_ends_after_the_seconds_that_it_may_take() -> None:
    with pytest.raises(RuntimeError, match="not done after 0 s"):
        next(in_process(hang, "mine", within_s=0.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_benchmark_of_devices_says_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert "there is no CUDA device here" in said
    assert "needs a CUDA device with 40 GiB of free memory" in said
