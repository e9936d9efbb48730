"""The command ``remat reduce``: shrink a failing joint graph."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from remat.cli import params
from remat.cli.commands import json_option, main
from remat.cli.output import INTERRUPTED, as_json
from remat.cli.progress import Progress
from remat.cli.repro import replay
from remat.errors import RematError
from remat.files import write_file, writing

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.instruments.reproducer import Failure

#: Dict from each exit code with which a shell reports that it could not start a command to the reason.
_NOT_RUN = {126: "may not execute it", 127: "does not find it"}
#: Files of a reproducer that describe the original graph. Such files are not copied, because they are wrong
#: for the smaller graph.
_OUTDATED = ("problem.json", "traceback.txt", "README.txt")


@main.command("reduce")
@click.argument("source", metavar="FOLDER|JOINT", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--test",
    metavar="COMMAND",
    help="shell command that ends with an exit code other than 0 if the graph fails; {} stands for the file or "
    "folder. By default the failure of FOLDER is run again, and must raise the recorded kind of error",
)
@click.option(
    "--test-timeout",
    type=params.SECONDS,
    metavar="SECONDS",
    help="a command that takes longer is ended and counts as not failing [default: no limit]",
)
@click.option(
    "-o",
    "--output",
    type=params.OutputFile(),
    help="where to write the result; it must not exist [default: beside the input, with -reduced "
    "behind its name]",
)
@json_option
def reduce_(
    source: Path,
    test: str | None,
    test_timeout: float | None,
    output: Path | None,
) -> None:
    """Shrink a failing joint graph while it keeps failing.

    FOLDER is a reproducer that remat wrote when a pass or solver crashed. JOINT is a file with a
    joint graph as text. The input is not changed. The smallest graph found is written beside the
    input, or to --output. After Ctrl-C, the smallest graph found so far is written, and the exit
    code is 130.
    """
    from remat.graph.text import SUFFIX, print_joint, read_joint
    from remat.passes.instruments.reproducer import GRAPH, read_reproducer
    from remat.reduction import reduce

    recorded = read_reproducer(source) if source.is_dir() else None
    if recorded is None and test is None:
        raise click.UsageError("a JOINT needs a --test that says whether it fails")
    if test is not None and "{}" not in test:
        raise click.UsageError(f"--test '{test}' has no {{}} where the graph's file is to stand")
    suffix = SUFFIX if recorded is None else ""
    target = output or source.with_name(f"{source.name.removesuffix(suffix)}-reduced{suffix}")
    if target.exists():
        raise click.UsageError(f"'{target}' exists already; name another with -o, or remove it")
    with Progress() as progress, tempfile.TemporaryDirectory(prefix="remat-reduce-") as room:
        progress.stage(f"reading {source}")
        joint = read_joint(source if recorded is None else source / GRAPH)
        place = Path(room) / source.name
        if recorded is not None:
            shutil.copytree(source, place)
        fails: Callable[[JointGraph], bool]
        if test is not None:
            fails = _command(test, test_timeout, place)
        else:
            assert recorded is not None
            fails = _fails_alike(recorded)
        progress.stage("reducing")
        reduced = reduce(joint, fails, progress=progress.detail)
    text = print_joint(reduced.joint)
    if recorded is None:
        write_file(target, text, "joint graph")
    else:
        _write_folder(source, target, recorded, reduced.joint, text)
    counts = ("before", "nodes", "tests", "interrupted")
    if not as_json({"written": str(target), **{k: getattr(reduced, k) for k in counts}}):
        so_far = "interrupted; so far: " if reduced.interrupted else ""
        click.echo(
            f"{so_far}{reduced.before} -> {reduced.nodes} nodes in {reduced.tests} tests, written to {target}"
        )
    if reduced.interrupted:
        click.get_current_context().exit(INTERRUPTED)


def _fails_alike(recorded: Failure) -> Callable[[JointGraph], bool]:
    """Return a function that replays a recorded failure on a graph, and tests whether the same kind of error occurs."""
    wanted = recorded.type, _kind(recorded.message)

    def fails(joint: JointGraph) -> bool:
        error = replay(joint, recorded)
        return error is not None and (type(error).__name__, _kind(str(error))) == wanted

    return fails


def _kind(message: str) -> str:
    """Return the first line of an error message, with quoted names and numbers blanked out."""
    # Names and numbers depend on the graph, which changes during the reduction.
    first = message.strip().partition("\n")[0]
    first = re.sub(r" \(passes completed before it: [^)]*\)", "", first)
    # A message may list one fault for each of several nodes, separated by semicolons.
    first = first.partition(";")[0]
    return re.sub(r"\d+", "0", re.sub(r"'[^']*'", "'…'", first))


def _command(command: str, timeout_s: float | None, place: Path) -> Callable[[JointGraph], bool]:
    """Return a function that writes a graph to ``place``, and tests whether a shell command fails on it."""
    from remat.graph.text import write_joint

    line = command.replace("{}", shlex.quote(str(place)))
    file = place / "graph.joint" if place.is_dir() else place

    ran = False

    def fails(joint: JointGraph) -> bool:
        nonlocal ran
        write_joint(file, joint)
        # The command gets a session of its own, so that Ctrl-C interrupts the reduction, not the command. The command
        # and its child processes are then killed below.
        run = subprocess.Popen(
            line,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = run.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            if run.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        # The error is raised only before the first complete run, because a later error would lose
        # the reduction so far.
        if code in _NOT_RUN and not ran:
            raise click.UsageError(
                f"--test '{command}' could not be run: the shell {_NOT_RUN[code]} (exit code {code}); "
                f"expected a command that runs and says by its exit code whether {file.name} fails, "
                "such as 'python check.py {}'"
            )
        ran = True
        return code not in (0, *_NOT_RUN)

    return fails


def _write_folder(
    source: Path, target: Path, recorded: Failure, joint: JointGraph, text: str
) -> None:
    """Write a reproducer folder for the reduced graph atomically; ``text`` is the graph's text."""
    from remat.passes.instruments.reproducer import GRAPH, Failure, new_folder, write_files

    error = replay(joint, recorded)
    with writing(target, kind="reproducer", error=RematError), new_folder(target) as draft:
        outdated = shutil.ignore_patterns(*_OUTDATED)
        shutil.copytree(source, draft, ignore=outdated, dirs_exist_ok=True)
        (draft / GRAPH).write_text(text, encoding="utf-8")
        if error is not None:
            failure = Failure.of(
                error,
                path=recorded.path,
                pipeline=recorded.pipeline,
                options=recorded.options,
                note=recorded.note,
            )
            write_files(draft, target.name, failure, text, error)
