"""The command ``remat reduce``."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result

import remat
from remat.graph.text import read_joint
from remat.integrations.partitioner import Partitioner
from remat.passes.core.state import PassResult, State
from remat.passes.split.reorder_backward import ReorderBackward
from tests.cli.command import run as command
from tests.passes.instruments.sample import TEXT, step
from tests.passes.instruments.solvers import Crashes

CRASHES = f"{Crashes.__module__}:Crashes"
COMMAND = "from remat.cli import main; main()"
#: Fails where the graph has a sine, as a shell says it.
HAS_SINE = "! grep -q aten.sin.default {}"


def run(*args: object) -> Result:
    return command("reduce", *map(str, args))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with nothing in it."""
    path = tmp_path / "place"
    path.mkdir()
    return path


@pytest.fixture
def joint(place: Path) -> Path:
    path = place / "a step.joint"
    path.write_text(TEXT)
    return path


def failed(start: remat.JointGraph, place: Path, **options: str) -> Path:
    """The folder that a failed compilation leaves."""
    with pytest.raises(remat.RematError, match=r"ZeroDivisionError|nobody thought of"):
        Partitioner(repro=str(place), **options)(  # type: ignore[arg-type]
            start.graph_module, [None], num_fwd_outputs=start.num_fwd_outputs
        )
    (folder,) = place.iterdir()
    return folder


def test_a_file_is_reduced_beside_it(joint: Path) -> None:
    done = run(joint, "--test", HAS_SINE)
    assert (done.exit_code, done.stderr) == (0, "")
    made = joint.with_name("a step-reduced.joint")
    assert done.stdout.startswith("23 -> 3 nodes in ")
    assert done.stdout.endswith(f" tests, written to {made}\n")
    assert "aten.sin.default" in made.read_text()
    assert len(read_joint(made).graph.nodes) == 3
    assert joint.read_text() == TEXT
    assert {p.name for p in joint.parent.iterdir()} == {joint.name, made.name}, "no draft is left"


def test_another_place_and_json(joint: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"
    done = run(joint, "--test", HAS_SINE, "-o", target, "--json")
    told = json.loads(done.stdout)
    assert (told["before"], told["nodes"], told["interrupted"]) == (23, 3, False)
    assert told["written"] == str(target)
    assert told["tests"] > 3
    assert read_joint(target).name == "step"
    again = run(joint, "--test", HAS_SINE, "-o", target)
    assert again.exit_code == 2
    assert "exists already; name another with -o" in again.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--test", "true {}"], 1, "graph 'step' does not fail: "),
        (["--test", "nosuchcommand {}"], 2, "--test 'nosuchcommand {}' could not be run: the shell does"),
        (["--test", "/ {}"], 2, "could not be run: the shell may not execute it (exit code 126)"),
        (["--test", "sleep 60; cat {}; false", "--test-timeout", "0.2"], 1, "does not fail"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(joint: Path, args: list[str], code: int, message: str) -> None:
    done = run(joint, *args)
    assert done.exit_code == code
    assert message in done.stderr
    assert list(joint.parent.iterdir()) == [joint]


def test_a_command_that_is_gone_later_does_not_fail_any_more(joint: Path, tmp_path: Path) -> None:
    mark = shlex.quote(str(tmp_path / "mark"))
    done = run(joint, "--test", f"[ -e {mark} ] && nosuchcommand {{}}; touch {mark}; exit 1")
    assert done.exit_code == 0, done.output


def test_ctrl_c_leaves_the_smallest_so_far(joint: Path, tmp_path: Path) -> None:
    """A real process, which its own test interrupts."""
    counted = shlex.quote(str(tmp_path / "count"))
    sixth = f"echo >> {counted}; [ $(wc -l < {counted}) = 6 ] && kill -INT $PPID; {HAS_SINE}"
    made = subprocess.run(
        [sys.executable, "-c", COMMAND, "reduce", str(joint), "--test", sixth],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert made.returncode == 130
    assert made.stdout.startswith("interrupted; so far: 23 -> ")
    assert "aten.sin.default" in joint.with_name("a step-reduced.joint").read_text()


def test_a_solver_that_crashes(place: Path) -> None:
    """The folder that a failed compilation leaves, replayed as it was recorded."""
    folder = failed(step(), place, solver=CRASHES)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    done = run(folder)
    assert done.exit_code == 0, done.output
    small = folder.with_name(f"{folder.name}-reduced")
    assert len(read_joint(small / "graph.joint").graph.nodes) < 15
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert f"remat repro {small.name}" in (small / "README.txt").read_text()
    assert command("repro", str(small)).exit_code == 1
    assert sorted(p.name for p in place.iterdir()) == [folder.name, small.name]


def test_a_pass_that_crashes_at_one_operator(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReorderBackward.run

    def crash(self: ReorderBackward, state: State) -> PassResult:
        assert state.backward is not None
        for node in state.backward.graph.nodes:
            if node.target is torch.ops.aten.cos.default:
                raise IndexError(f"nobody thought of '{node.name}'")
        return right(self, state)

    monkeypatch.setattr(ReorderBackward, "run", crash)
    folder = failed(step(), place)
    done = run(folder, "-o", place / "small")
    assert done.exit_code == 0, done.output
    small = read_joint(place / "small" / "graph.joint")
    assert len(small.graph.nodes) < 15
    assert any(n.target is torch.ops.aten.cos.default for n in small.graph.nodes)
    assert command("repro", str(place / "small")).exit_code == 1


def test_a_folder_with_a_command(tmp_path: Path) -> None:
    folder = failed(step(), tmp_path / "repro", solver=CRASHES)
    done = run(folder, "--test", "! grep -q aten.cos {}/graph.joint")
    assert done.exit_code == 0, done.output
    small = folder.with_name(f"{folder.name}-reduced")
    assert "aten.cos" in (small / "graph.joint").read_text()
    assert (small / "failure.json").is_file()
