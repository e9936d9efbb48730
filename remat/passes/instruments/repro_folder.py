"""Reproducers: folders with what it takes to see a failure again, elsewhere and later.

The folder holds text only: the joint graph (operators and shapes, no weights, no data), the pipeline,
versions, the traceback and, where a solver failed, the problem that it failed at. No environment is
written down.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import re
import shlex
import shutil
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from remat.errors import ProblemError, RematError, append_message
from remat.files import Form, read_as, read_record
from remat.solvers.instances import Instance, save_instance

#: Bytes of a file of a reproducer that are read, at most; the graph has a limit of its own.
MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A run that failed.

    Attributes:
        graph: text of the joint graph.
        pipeline: text of the pipeline; empty where `options` say how the graph was planned.
        options: arguments of `remat.plan` by name; empty where a pipeline was run by itself.
        path: the pass that failed, with those that it is inside of before it; empty if it was none.
        error: what was raised.
        instance: the problem that a solver failed at.
        note: what else to know about the graph.
    """

    graph: str
    pipeline: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    error: BaseException
    instance: Instance | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A failure as it was written down; what is not named here is as in `Failure`.

    Attributes:
        graph: file of the joint graph.
        checks: what `VerifyEach` was checking when it found the failure, or empty.
        type: class of the error.
        message: its message.
    """

    form: ClassVar[Form] = Form("reproducer", "remat_repro", 1)

    graph: Path
    pipeline: str
    options: Mapping[str, str]
    path: tuple[str, ...]
    checks: str
    type: str
    message: str
    note: str

    def is_same(self, error: BaseException) -> bool:
        """Whether an error is the recorded one: of the same class, and with the same message.

        Addresses and the passes that had run before do not count.
        """
        return type(error).__name__ == self.type and _plain(str(error)) == _plain(self.message)


def write_reproducer(folder: Path, failure: Failure) -> Path:
    """Writes a folder ``remat-repro-<pass>-<digest>`` inside of ``folder``, whole or not at all.

    The digest is of the graph, the pipeline and the error: the same failure gets the same folder.

    Returns:
        The folder.

    Raises:
        OSError: it cannot be written.
    """
    what = failure.path[-1] if failure.path else "plan"
    target = folder / f"remat-repro-{re.sub(r'[^A-Za-z0-9._-]', '_', what)}-{_digest(failure)}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    try:
        for name, text in files_of(failure, target.name).items():
            (draft / name).write_text(text, encoding="utf-8")
        if failure.instance is not None:
            with contextlib.suppress(RematError):  # one that is too large to be read again
                save_instance(draft / "problem.json", failure.instance)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if target.is_dir():  # somebody else was faster
            return target
        raise
    return target


def read_reproducer(folder: Path) -> Recorded:
    """Reads what `write_reproducer` wrote; the graph itself is left to `remat.graph.text`.

    Raises:
        ProblemError: the folder holds no reproducer; the message says what is missing or wrong.
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
    """Writes a reproducer, and says in the error where it is or why there is none.

    The error itself is never replaced, whatever goes wrong here.

    Returns:
        The folder; None where none could be written.
    """
    try:
        written = write_reproducer(folder, describe())
    except Exception as other:
        append_message(error, f"no reproducer was written to '{folder}': {other}")
        return None
    append_message(error, f"reproducer: {written} (see it again with: remat repro FOLDER)")
    return written


def versions() -> dict[str, Any]:
    """What a failure may depend on: remat, PyTorch, Python, the platform, and plugins."""
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
    """The files of a reproducer's folder, by name; ``name`` is that of the folder."""
    error = failure.error
    record = {
        Recorded.form.key: Recorded.form.version,
        "path": list(failure.path),
        "checks": getattr(error, "found_by", ""),
        "type": type(error).__name__,
        "message": str(error),
        "pipeline": failure.pipeline,
        "options": dict(failure.options),
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
    parts = (
        failure.graph,
        failure.pipeline,
        json.dumps(dict(failure.options), sort_keys=True),
        type(failure.error).__name__,
        _plain(str(failure.error)),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _plain(message: str) -> str:
    """A message without what may differ from run to run: addresses in memory, what ran before."""
    without = re.sub(r" \(passes completed before it: [^)]*\)", "", message)
    return re.sub(r"0x[0-9a-fA-F]+", "0x…", without)
