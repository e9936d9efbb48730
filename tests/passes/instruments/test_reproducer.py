"""Reproducers: what is in the folder, that it is whole, and that nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.cli.repro import replay
from remat.errors import PassError, ProblemError, SolverError, append_message
from remat.graph.text import read_joint
from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Pipeline
from remat.passes.instruments import Reproducer, VerifyEach
from remat.passes.instruments.reproducer import GRAPH, read_reproducer
from remat.passes.joint.dce import DeadCode
from remat.solvers.graph.problem import GraphProblem
from tests.passes.instruments.passes import Raises, Twice, Wrong, run
from tests.passes.instruments.sample import TEXT, step
from tests.passes.instruments.solvers import Crashes


def failing(folder: Path, *passes: Pass) -> Path:
    """The reproducer that a failing pipeline leaves in a folder."""
    reproducer = Reproducer(folder)
    with pytest.raises(PassError):
        run(step(), list(passes), reproducer)
    assert reproducer.written is not None
    return reproducer.written


def test_a_failed_pass_leaves_a_folder(tmp_path: Path) -> None:
    reproducer = Reproducer(tmp_path / "here")
    with pytest.raises(PassError, match="'twice > raises' failed: KeyError: 'half-way'") as caught:
        run(step(), [DeadCode(), Twice((Raises(),))], reproducer)
    folder = reproducer.written
    assert folder is not None
    assert folder.parent == tmp_path / "here"
    assert folder.name.startswith("remat-repro-raises-")
    assert len(folder.name) == len("remat-repro-raises-") + 8
    assert f"reproducer: {folder}" in str(caught.value)
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.txt",
        "failure.json",
        "graph.joint",
        "traceback.txt",
        "versions.json",
    ]
    assert (folder / "graph.joint").read_text() == TEXT, "as it was before any pass"
    assert "KeyError: 'half-way'" in (folder / "traceback.txt").read_text()
    assert f"remat repro {folder.name}" in (folder / "README.txt").read_text()
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["remat"] == remat.__version__
    assert list(versions) == ["remat", "torch", "python", "platform", "plugins"]
    recorded = read_reproducer(folder)
    assert (recorded.pipeline, recorded.path) == ("dce,twice(raises)", ("twice", "raises"))
    assert recorded.type == "PassError"
    assert "reproducer:" not in recorded.message
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "no draft is left"


def test_the_same_failure_gets_the_same_folder(tmp_path: Path) -> None:
    pipelines = ([Raises()], [Raises()], [DeadCode(), Raises()])
    folders = {failing(tmp_path, *passes) for passes in pipelines}
    assert len(folders) == 2
    assert set(tmp_path.iterdir()) == folders


def test_in_place_too_the_graph_is_that_of_the_beginning(tmp_path: Path) -> None:
    graph, reproducer = step(), Reproducer(tmp_path)
    with pytest.raises(PassError):
        Pipeline((DeadCode(), Raises())).run(graph, in_place=True, instruments=[reproducer])
    assert reproducer.written is not None
    assert (reproducer.written / "graph.joint").read_text() == TEXT


def test_no_environment_and_no_path_of_the_user_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret-of-the-environment")
    for path in failing(tmp_path, Raises()).iterdir():
        text = path.read_text()
        assert "s3cret" not in text, path.name
        if path.name != "traceback.txt":
            assert str(Path.home()) not in text or str(Path.home()) == "/", path.name
            assert str(tmp_path) not in text, path.name


@pytest.mark.parametrize("kind", ["solve-graph", "knapsack"])
def test_a_solver_that_crashes_leaves_its_problem(tmp_path: Path, kind: str) -> None:
    (decides,) = remat.PassManager.parse(f"{kind}(solver=greedy,budget=0.1,cost=flops)").passes
    object.__setattr__(decides, "solver", Crashes())
    reproducer = Reproducer(tmp_path)
    with pytest.raises(SolverError, match="'crashes' raised ZeroDivisionError") as caught:
        run(step(), [DeadCode(), decides], reproducer)
    assert reproducer.written is not None
    assert reproducer.written.name.startswith(f"remat-repro-{kind}-")
    instance = remat.load_instance(reproducer.written / "problem.json")
    assert instance.problem == caught.value.problem
    assert isinstance(instance.problem, GraphProblem) == (kind == "solve-graph")
    assert remat.plan(step(), 0.1, cost="flops").recomputed, "the graph itself can be planned"
    assert "remat solve problem.json" in (reproducer.written / "README.txt").read_text()


def test_checks_of_other_instruments_leave_one_too(tmp_path: Path) -> None:
    reproducer = Reproducer(tmp_path)
    with pytest.raises(PassError, match=r"it changed the numbers(.|\n)*reproducer:"):
        run(step(), [Wrong()], reproducer, VerifyEach(numbers=True))
    assert reproducer.written is not None
    recorded = read_reproducer(reproducer.written)
    assert recorded.checks == "numbers"
    error = replay(read_joint(reproducer.written / GRAPH), recorded, Pipeline((Wrong(),)))  # type: ignore[arg-type]
    assert error is not None
    assert recorded.is_same(error), "found by the same check"


def test_the_failure_is_seen_where_no_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PassError, match=r"KeyError: 'half-way'(.|\n)*no reproducer was written to"):
        run(step(), [Raises()], Reproducer(tmp_path / "file"))


def test_a_run_that_is_well_writes_nothing(tmp_path: Path) -> None:
    reproducer = Reproducer(tmp_path / "here")
    run(step(), "dce,cse", reproducer)
    assert reproducer.written is None
    assert list(tmp_path.iterdir()) == []


def test_it_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PassError, match=r"no reproducer was written .*No space left"):
        run(step(), [Raises()], Reproducer(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_addresses_do_not_count(tmp_path: Path) -> None:
    recorded = read_reproducer(failing(tmp_path, Raises()))
    addressed = replace(recorded, type="KeyError", message="<object at 0x7f00>")
    assert addressed.is_same(KeyError("<object at 0x11aB>")) is False, "a KeyError quotes"
    addressed = replace(recorded, type="ValueError", message="<object at 0x7f00>")
    assert addressed.is_same(ValueError("<object at 0x11aB>"))
    assert not addressed.is_same(TypeError("<object at 0x7f00>"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "failure.json").unlink(), "failure.json' cannot be read: No such file"),
        (lambda f: (f / "failure.json").write_text("{"), "failure.json' cannot be read: this is not a saved reproducer: Expecting"),
        (lambda f: (f / "failure.json").write_text("[]"), "JSON with the key 'remat_repro'"),
        (lambda f: (f / "failure.json").write_text("[" * 10**6), "this is not a saved reproducer"),
        (lambda f: (f / "failure.json").write_text('{"remat_repro": 9}'), "of version 9"),
        (lambda f: (f / "failure.json").write_text('{"remat_repro": 1}'), r"fields missing: \['checks', 'message', .*'type'\]"),
        (lambda f: (f / "graph.joint").unlink(), "has no file graph.joint"),
    ],
)  # fmt: skip
def test_what_is_no_reproducer_is_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    folder = failing(tmp_path, Raises())
    spoil(folder)
    with pytest.raises(ProblemError, match=message):
        read_reproducer(folder)


def test_an_error_without_text_gets_a_note() -> None:
    for error in (KeyError(7), OSError(2, "gone")):
        args = error.args
        append_message(error, "look here")
        assert error.__notes__ == ["look here"]
        assert error.args == args
