"""Reproducers: folders from which a failure of a pass, a plan or a solver can be repeated.

A reproducer's folder holds text only: the joint graph (operators and shapes, no weights, no data), the
pipeline, versions and the traceback. If a solver failed, the folder also holds the problem that the
solver failed on. A reproducer holds no environment variable. The instrument `Reproducer` writes a
reproducer for each failed pass. `report` writes a reproducer for a compilation that failed
unexpectedly.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from remat.errors import (
    PassError,
    ProblemError,
    RematError,
    SolverError,
    VerifyError,
    append_message,
)
from remat.files import Form, read_as, read_record, write_record
from remat.graph.joint import JointGraph
from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Instrument, Pipeline, Run
from remat.passes.core.state import PassResult, State
from remat.passes.decide.budgeted import Budgeted, full_and_least
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.instances.instance import Instance, save_instance
from remat.solvers.problem import KnapsackProblem

#: Environment variable with the default folder for reproducers of crashed compilations; empty: write
#: no reproducers.
VARIABLE = "REMAT_REPRO_DIR"
#: Name of the file with the joint graph in a reproducer's folder.
GRAPH = "graph.joint"
#: Largest size in bytes of a ``failure.json`` that is read. `remat.graph.text` has its own limit for the
#: file of the graph.
MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed run of a pipeline or of planning, as the file ``failure.json`` of a reproducer records it.

    Attributes:
        path: names of the enclosing passes and of the failed pass; empty if the failed pass is unknown.
        checks: ``"structure"`` or ``"numbers"``: the checks with which `VerifyEach` found the
            failure; empty if `VerifyEach` did not find it.
        type: class name of the error.
        message: message of the error.
        pipeline: text of the pipeline; empty if no single pipeline repeats the planning, such as
            under a budget on the peak.
        options: arguments of `remat.plan` by name, as JSON text; an empty dict if a pipeline was run without planning.
        note: further facts about the graph, for the README of the reproducer's folder.
    """

    form: ClassVar[Form] = Form("reproducer", "remat_repro", 1)

    path: tuple[str, ...]
    checks: str
    type: str
    message: str
    pipeline: str
    options: str
    note: str

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        path: tuple[str, ...],
        pipeline: str,
        options: str = "{}",
        note: str = "",
    ) -> Failure:
        """Return an error's message without what differs from run to run: memory addresses, and completed passes."""
        return cls(
            path=path,
            checks=getattr(error, "found_by", ""),
            type=type(error).__name__,
            message=str(error),
            pipeline=pipeline,
            options=options,
            note=note,
        )

    def is_same(self, error: BaseException) -> bool:
        """Return whether ``error`` has the same class and message as the recorded error."""
        # Memory addresses, and the list of passes that ran before, are ignored in the messages.
        return type(error).__name__ == self.type and _plain(str(error)) == _plain(self.message)


def write_reproducer(
    folder: Path, failure: Failure, graph: str, error: BaseException, instance: Instance | None
) -> Path:
    """Write a failure to a folder ``remat-repro-<pass>-<digest>`` inside ``folder``, atomically.

    The digest in the folder's name covers the failure's graph, pipeline, options and error. The folder
    of a failure that occurs again therefore exists already, and is not written again.

    Args:
        folder: where to create the failure's folder.
        failure: the failure.
        graph: text of the joint graph.
        error: the exception.
        instance: the problem that a solver failed on; None if no solver failed.

    Returns:
        The path of the failure's folder, new or existing.

    Raises:
        OSError: the folder cannot be written.
    """
    subject = failure.path[-1] if failure.path else "plan"
    parts = (graph, failure.pipeline, failure.options, failure.type, _plain(failure.message))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
    target = folder / f"remat-repro-{re.sub(r'[^A-Za-z0-9._-]', '_', subject)}-{digest}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with new_folder(target) as draft:
            write_files(draft, target.name, failure, graph, error, instance)
    except OSError:
        if not target.is_dir():  # if it exists, another process wrote the same failure first
            raise
    return target


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Create a folder atomically: yield a temporary folder, and rename it to ``target`` after the ``with`` block.

    If the ``with`` block raises, the temporary folder is removed.

    Raises:
        OSError: the folder cannot be created, or ``target`` exists already.
    """
    # In the same folder, because a rename is atomic only within one file system.
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.resolve().parent))
    try:
        yield draft
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_reproducer(folder: Path) -> Failure:
    """Read a failure from a folder that `write_reproducer` wrote; the folder's file `GRAPH` has the joint graph.

    Raises:
        ProblemError: the folder holds no reproducer; the message says which file is missing or
            wrong.
    """
    expected = "expected a folder that a Reproducer wrote, such as remat-repro-cse-1a2b3c4d"
    if not folder.is_dir():
        raise ProblemError(f"there is no folder '{folder}'; {expected}")
    failure = read_as(
        "reproducer",
        folder / "failure.json",
        lambda text: read_record(Failure, text),
        MAX_BYTES,
    )
    if not (folder / GRAPH).is_file():
        raise ProblemError(f"'{folder}' has no file {GRAPH}; {expected}")
    return failure


def leave_reproducer(
    folder: Path,
    error: BaseException,
    joint: JointGraph,
    describe: Callable[[], tuple[Failure, Instance | None]],
) -> Path | None:
    """Write a reproducer of a failure, and append the path of the reproducer's folder to the error's message.

    If no reproducer can be written, the reason is appended to the message instead of a path. An
    exception while the reproducer is written never replaces ``error``.

    Args:
        folder: where to create the reproducer's folder.
        error: the error whose message is extended.
        joint: the joint graph.
        describe: returns the failure, and the problem that a solver failed on, or None.

    Returns:
        The path of the reproducer's folder; None if no reproducer could be written.
    """
    from remat.graph.text import print_joint

    try:
        failure, instance = describe()
        written = write_reproducer(folder, failure, print_joint(joint), error, instance)
    except Exception as other:
        append_message(error, f"no reproducer was written to '{folder}': {other}")
        return None
    append_message(error, f"reproducer: {written} (see it again with: remat repro FOLDER)")
    return written


class Reproducer(Instrument):
    """Instrument that writes a reproducer if a pass fails; ``remat repro FOLDER`` repeats the failure.

    The reproducer holds the joint graph as it was before the pipeline's first pass, so the instrument
    keeps a copy of that graph while the pipeline runs. The path of the reproducer's folder is appended
    to the message of the pass's error.

    Args:
        folder: where to create reproducers' folders; created if missing.

    Attributes:
        written: path of the last reproducer; None if no pass failed.
    """

    only_inner: ClassVar[bool] = True  # a `Fixpoint` fails with the error of its inner pass

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.written: Path | None = None
        self._joint: JointGraph
        self._pipeline = ""

    def around_pipeline(self, pipeline: Pipeline, state: State, run: Run) -> PassResult:
        self._joint, self._pipeline = state.joint.copy(), str(pipeline)
        return run(state)

    def around_pass(self, p: Pass, state: State, path: tuple[str, ...], run: Run) -> PassResult:
        try:
            return run(state)
        except Exception as error:
            describe = partial(self._describe, p, state, path, error)
            written = leave_reproducer(self.folder, error, self._joint, describe)
            self.written = written or self.written
            raise

    def _describe(
        self, p: Pass, state: State, path: tuple[str, ...], error: Exception
    ) -> tuple[Failure, Instance | None]:
        """Return a record of a pass's failure, and the problem that a solver failed on (None if no solver failed)."""
        failure = Failure.of(error, path=path, pipeline=self._pipeline)
        if not isinstance(p, Budgeted):
            return failure, None
        return failure, instance_of(error, state, str(p.cost), p.cost.unit)


def instance_of(error: Exception, state: State, cost: str, unit: str = "") -> Instance | None:
    """Return the problem that a solver failed on as a problem instance; None if no solver failed.

    Args:
        error: the exception; if a solver failed, ``error.problem`` is the problem.
        state: the state from which the problem was built.
        cost: the problem's cost model as text.
        unit: unit of the costs of a knapsack problem; a graph problem holds its own unit.
    """
    problem = getattr(error, "problem", None)
    full_bytes = least = None
    if isinstance(problem, GraphProblem):
        unit, full_bytes, least = problem.unit, 0, 0
        with contextlib.suppress(Exception):  # the instance is useful without this data
            full_bytes, least = full_and_least(state)
    elif not isinstance(problem, KnapsackProblem):
        return None
    return Instance(
        name="failure",
        problem=problem,
        full_bytes=full_bytes,
        least_bytes=least,
        cost=cost,
        unit=unit,
        source="a problem that a solver failed at",
    )


def is_unexpected(error: BaseException) -> bool:
    """Return whether a failure is a fault of a pass or a solver rather than of the user's input."""
    # Examples of user errors are a budget that cannot be met, invalid options, conflicting tags and a missing solver.
    # Such errors need no reproducer.
    if isinstance(error, SolverError):
        return error.problem is not None
    if isinstance(error, RematError):
        return isinstance(error, (PassError, VerifyError))
    return isinstance(error, Exception)


def folder_for(given: object) -> Path | None:
    """Return the folder in which reproducers are created; None if no reproducers are to be written.

    Args:
        given: a path; None or True for the default; False to write no reproducers. The default is
            the folder that the environment variable `VARIABLE` names; an empty variable means no
            reproducers. If the variable is not set, the default is a folder of the current user
            below the system's folder for temporary files.

    Raises:
        ProblemError: ``given`` is not a path, None or a bool.
    """
    if given is None or given is True:
        named = os.environ.get(VARIABLE)
        if named is not None:
            return Path(named) if named else None
        try:
            # The user's number keeps the folders of several users of one machine apart.
            return Path(tempfile.gettempdir()) / f"remat-repro-of-{os.getuid()}"
        except OSError:  # no folder can be written, or the disk is full
            return None
    if given is False:
        return None
    if isinstance(given, (str, Path)) and str(given):
        return Path(given)
    raise ProblemError(f"repro is {given!r}; expected the path of a folder, or False for none")


def report(
    error: Exception,
    joint: JointGraph,
    folder: Path | None,
    describe: Callable[[], tuple[str, Mapping[str, Any], str]],
) -> None:
    """Write a reproducer if an error of planning is unexpected, and append the reproducer's path to the message.

    The reproducer holds the joint graph as the failure left it, because planning keeps no earlier copy
    of the graph.

    Args:
        error: the exception.
        joint: the graph that was being planned.
        folder: where to create the reproducer's folder; None: write no reproducer.
        describe: returns three values for the `Failure`: the text of the pipeline, the options of
            `remat.plan` by name, and the note.
    """
    if folder is None or not is_unexpected(error):
        return

    def failure() -> tuple[Failure, Instance | None]:
        pipeline, options, note = describe()
        recorded = Failure.of(
            error,
            path=tuple(error.pass_name.split(" > ")) if isinstance(error, PassError) else (),
            pipeline=pipeline,
            options=json.dumps(dict(options), sort_keys=True),
            note=" ".join((_NOTE, note)).strip(),
        )
        return recorded, instance_of(error, State(joint=joint), options.get("cost", ""))

    leave_reproducer(folder, error, joint, failure)


_NOTE = (
    "The graph is as it was when the failure was noticed: passes that come before the decision, such "
    "as dce and cse, had changed it already, and one of them that fails leaves it half-way."
)


def versions() -> dict[str, Any]:
    """Return a dict with the versions of remat, PyTorch, Python and the plugins, and with the platform."""
    import torch

    entries = importlib.metadata.entry_points(group="remat")
    plugins = {entry.dist.name: entry.dist.version for entry in entries if entry.dist}
    return {
        "remat": importlib.metadata.version("remat"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "plugins": dict(sorted(plugins.items())),
    }


def write_files(
    folder: Path,
    name: str,
    failure: Failure,
    graph: str,
    error: BaseException,
    instance: Instance | None = None,
) -> None:
    """Write the files of a reproducer to a folder; arguments as in `write_reproducer`.

    Args:
        folder: the folder.
        name: name of the reproducer's folder, which the README mentions.
        failure: the failure.
        graph: text of the joint graph.
        error: the exception.
        instance: the problem that a solver failed on.
    """
    files = {
        GRAPH: graph,
        "failure.json": write_record(failure),
        "versions.json": json.dumps(versions(), indent=2) + "\n",
        "traceback.txt": "".join(traceback.format_exception(error)),
        "README.txt": _readme(name, failure, has_problem=instance is not None),
    }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    if instance is not None:
        with contextlib.suppress(RematError):  # the instance is too large to be read again
            save_instance(folder / "problem.json", instance)


def _readme(name: str, failure: Failure, *, has_problem: bool) -> str:
    """Return the text of a reproducer's README: the failure, and commands that repeat the failure."""
    where = f"Pass '{' > '.join(failure.path)}'" if failure.path else "Planning"
    parts = [
        f"{where} failed:",
        textwrap.indent(f"{failure.type}: {failure.message}", "    "),
        f"See it again:\n\n    remat repro {name}",
        f"or first make it small:\n\n    remat reduce {name}",
    ]
    if failure.pipeline:
        parts.append(
            "or step by step, inside of this folder:\n\n"
            f"    remat opt {GRAPH} --passes {shlex.quote(failure.pipeline)} "
            f"--verify-each={failure.checks or 'structure'} --print-changed"
        )
    if has_problem:
        parts.append(
            "The solver failed at the problem in problem.json:\n\n"
            "    remat solve problem.json --solver NAME"
        )
    parts += [
        failure.note,
        f"{GRAPH} holds operators, shapes and tags, and names lines of the model's source;\n"
        "traceback.txt names files. No file here holds weights, data, or the environment.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _plain(message: str) -> str:
    """Return an error's message without memory addresses and completed passes, which differ from run to run."""
    without = re.sub(r" \(passes completed before it: [^)]*\)", "", message)
    return re.sub(r"0x[0-9a-fA-F]+", "0x…", without)
