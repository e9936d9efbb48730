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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from remat.errors import (
    PassError,
    ProblemError,
    RematError,
    SolverError,
    VerifyError,
    append_message,
)
from remat.files import Form, read_as, read_record
from remat.passes.core.pipeline import Instrument
from remat.passes.core.state import State
from remat.passes.decide.budgeted import Budgeted, full_and_least
from remat.passes.decide.knapsack import Knapsack
from remat.passes.decide.solve_graph import SolveGraph
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.instances.instance import Instance, save_instance
from remat.solvers.problem import KnapsackProblem

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline

#: Environment variable with the default folder for reproducers of crashed compilations; empty: write
#: no reproducers.
VARIABLE = "REMAT_REPRO_DIR"
#: Largest size in bytes of a ``failure.json`` that is read. `remat.graph.text` has its own limit for the
#: file of the graph.
MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed run of a pipeline or of planning, with everything that a reproducer needs.

    Attributes:
        graph: text of the joint graph.
        pipeline: text of the pipeline; empty if no single pipeline repeats the planning, such as
            under a budget on the peak.
        options: arguments of `remat.plan` by name, as JSON text; an empty dict if a pipeline was run without planning.
        path: names of the enclosing passes and of the failed pass; empty if no pass failed.
        error: the exception.
        instance: the problem that a solver failed on; None if no solver failed.
        note: further facts about the graph, for the README of the reproducer's folder.
    """

    graph: str
    pipeline: str = ""
    options: str = "{}"
    path: tuple[str, ...] = ()
    error: BaseException
    instance: Instance | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A failure as read from a reproducer's folder. Attributes that are not listed are as in `Failure`.

    Attributes:
        graph: path of the file with the joint graph.
        checks: ``"structure"`` or ``"numbers"``: the checks with which `VerifyEach` found the
            failure; empty if `VerifyEach` did not find it.
        type: class name of the recorded error.
        message: message of the recorded error.
    """

    form: ClassVar[Form] = Form("reproducer", "remat_repro", 1)

    graph: Path
    pipeline: str
    options: str
    path: tuple[str, ...]
    checks: str
    type: str
    message: str
    note: str

    def is_same(self, error: BaseException) -> bool:
        """Return whether ``error`` has the same class and message as the recorded error."""
        # Memory addresses, and the list of passes that ran before, are ignored in the messages.
        return type(error).__name__ == self.type and _plain(str(error)) == _plain(self.message)


def write_reproducer(folder: Path, failure: Failure) -> Path:
    """Write a failure to a folder ``remat-repro-<pass>-<digest>`` inside ``folder``, atomically.

    The digest in the folder's name covers the failure's graph, pipeline, options and error. The folder
    of a failure that occurs again therefore exists already, and is not written again.

    Returns:
        The path of the failure's folder, new or existing.

    Raises:
        OSError: the folder cannot be written.
    """
    subject = failure.path[-1] if failure.path else "plan"
    target = folder / f"remat-repro-{re.sub(r'[^A-Za-z0-9._-]', '_', subject)}-{_digest(failure)}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with new_folder(target) as draft:
            for name, text in files_of(failure, target.name).items():
                (draft / name).write_text(text, encoding="utf-8")
            if failure.instance is not None:
                with contextlib.suppress(RematError):  # the instance is too large to be read again
                    save_instance(draft / "problem.json", failure.instance)
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


def read_reproducer(folder: Path) -> Recorded:
    """Read a failure from a folder that `write_reproducer` wrote.

    The returned `Recorded` has the path of the joint graph's file, which `remat.graph.text` can read.

    Raises:
        ProblemError: the folder holds no reproducer; the message says which file is missing or
            wrong.
    """
    expected = "expected a folder that a Reproducer wrote, such as remat-repro-cse-1a2b3c4d"
    if not folder.is_dir():
        raise ProblemError(f"there is no folder '{folder}'; {expected}")
    graph = folder / "graph.joint"
    recorded = read_as(
        "reproducer",
        folder / "failure.json",
        lambda text: read_record(Recorded, text, graph=graph),
        MAX_BYTES,
    )
    if not graph.is_file():
        raise ProblemError(f"'{folder}' has no file graph.joint; {expected}")
    return recorded


def leave_reproducer(
    folder: Path, error: BaseException, describe: Callable[[], Failure]
) -> Path | None:
    """Write a reproducer of a failure, and append the path of the reproducer's folder to the error's message.

    If no reproducer can be written, the reason is appended to the message instead of a path. An
    exception while the reproducer is written never replaces ``error``.

    Args:
        folder: where to create the reproducer's folder.
        error: the error whose message is extended.
        describe: returns the `Failure` that the reproducer records.

    Returns:
        The path of the reproducer's folder; None if no reproducer could be written.
    """
    try:
        written = write_reproducer(folder, describe())
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
        self._joint: JointGraph | None = None
        self._pipeline = ""
        self._note = ""

    def start(self, pipeline: Pipeline, state: State) -> None:
        self._joint, self._pipeline = state.joint.copy(), str(pipeline)
        self._note = ""
        if state.decision is not None or state.forward is not None:
            self._note = (
                "The run began on a graph that another pipeline had decided about or split: put the "
                "passes of that one before these to see the failure again."
            )

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        joint = self._joint
        # An interrupt is not a failure of a pass.
        if not isinstance(error, Exception) or joint is None:
            return
        from remat.graph.text import print_joint

        def describe() -> Failure:
            instance = None
            if isinstance(p, Budgeted):
                instance = instance_of(error, state, str(p.cost), p.cost.unit)
            return Failure(
                graph=print_joint(joint),
                pipeline=self._pipeline,
                path=path,
                error=error,
                instance=instance,
                note=self._note,
            )

        self.written = leave_reproducer(self.folder, error, describe) or self.written

    def finish(self, result: object) -> None:
        self._joint = None


def instance_of(error: Exception, state: State, cost: str, unit: str = "") -> Instance | None:
    """Return the problem that a solver failed on as a problem instance; None if no solver failed.

    Args:
        error: the exception; if a solver failed, ``error.problem`` is the problem.
        state: the state from which the problem was built.
        cost: the problem's cost model as text.
        unit: unit of the costs of a knapsack problem; a graph problem holds its own unit.
    """
    problem = getattr(error, "problem", None)
    source = "a problem that a solver failed at"
    if isinstance(problem, KnapsackProblem):
        return Instance(name="failure", problem=problem, cost=cost, unit=unit, source=source)
    if not isinstance(problem, GraphProblem):
        return None
    full_bytes = least = 0
    with contextlib.suppress(Exception):  # the instance is useful without this data
        full_bytes, least = full_and_least(state)
    return Instance(
        name="failure",
        problem=problem,
        full_bytes=max(full_bytes, least),
        least_bytes=least,
        cost=cost,
        unit=problem.unit,
        source=source,
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
    from remat.graph.text import print_joint

    def as_failure() -> Failure:
        pipeline, options, note = describe()
        return Failure(
            graph=print_joint(joint),
            pipeline=pipeline,
            options=json.dumps(dict(options), sort_keys=True),
            path=_path(error),
            error=error,
            instance=instance_of(error, State(joint=joint), options.get("cost", "")),
            note=" ".join((_NOTE, note)).strip(),
        )

    leave_reproducer(folder, error, as_failure)


_NOTE = (
    "The graph is as it was when the failure was noticed: passes that come before the decision, such "
    "as dce and cse, had changed it already, and one of them that fails leaves it half-way."
)


def _path(error: Exception) -> tuple[str, ...]:
    """Return the names of the passes around the failed pass, and its own name; empty if no failed pass is known."""
    if isinstance(error, PassError):
        return tuple(error.pass_name.split(" > "))
    if isinstance(error, SolverError):
        of_graph = isinstance(error.problem, GraphProblem)
        return (SolveGraph.name if of_graph else Knapsack.name,)
    return ()


def versions() -> dict[str, Any]:
    """Return a dict with the versions of remat, PyTorch, Python and the plugins, and with the platform."""
    import torch

    plugins: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group="remat"):
        dist = entry.dist
        plugins[dist.name if dist else entry.name] = dist.version if dist else ""
    return {
        "remat": importlib.metadata.version("remat"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "plugins": dict(sorted(plugins.items())),
    }


def files_of(failure: Failure, name: str) -> dict[str, str]:
    """Return the files of a reproducer, as a dict from each file's name to the file's text.

    Args:
        failure: the failure to describe.
        name: name of the reproducer's folder, which the README mentions.
    """
    error = failure.error
    record = {
        Recorded.form.key: Recorded.form.version,
        "path": list(failure.path),
        "checks": getattr(error, "found_by", ""),
        "type": type(error).__name__,
        "message": str(error),
        "pipeline": failure.pipeline,
        "options": failure.options,
        "note": failure.note,
    }
    files = {
        "graph.joint": failure.graph,
        "failure.json": json.dumps(record, indent=2) + "\n",
        "versions.json": json.dumps(versions(), indent=2) + "\n",
        "traceback.txt": "".join(traceback.format_exception(error)),
        "README.txt": _readme(failure, name),
    }
    if failure.pipeline:
        files["pipeline.txt"] = failure.pipeline + "\n"
    return files


def _readme(failure: Failure, name: str) -> str:
    """Return the text of a reproducer's README: the failure, and commands that repeat the failure."""
    error = failure.error
    where = f"Pass '{' > '.join(failure.path)}'" if failure.path else "Planning"
    parts = [
        f"{where} failed:",
        textwrap.indent(f"{type(error).__name__}: {error}", "    "),
        "See it again:",
        f"    remat repro {name}",
        "or first make it small:",
        f"    remat reduce {name}",
    ]
    if failure.pipeline:
        checks = getattr(error, "found_by", "") or "structure"
        passes = f"--passes {shlex.quote(failure.pipeline)}"
        parts += [
            "or step by step, inside of this folder:",
            f"    remat opt graph.joint {passes} --verify-each={checks} --print-changed",
        ]
    if failure.instance is not None:
        parts += [
            "The solver failed at the problem in problem.json:",
            "    remat solve problem.json --solver NAME",
        ]
    if failure.note:
        parts.append(failure.note)
    parts.append(
        "graph.joint holds operators, shapes and tags, and names lines of the model's source;\n"
        "traceback.txt names files. No file here holds weights, data, or the environment."
    )
    return "\n\n".join(parts) + "\n"


def _digest(failure: Failure) -> str:
    """Return a digest of a failure, with eight hexadecimal digits; equal failures have equal digests."""
    parts = (
        failure.graph,
        failure.pipeline,
        failure.options,
        type(failure.error).__name__,
        _plain(str(failure.error)),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _plain(message: str) -> str:
    """Return an error's message without memory addresses and completed passes, which differ from run to run."""
    without = re.sub(r" \(passes completed before it: [^)]*\)", "", message)
    return re.sub(r"0x[0-9a-fA-F]+", "0x…", without)
