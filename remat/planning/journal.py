"""Journal of a sweep: each row is written to disk as it completes, so that a sweep resumes after a crash."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from remat.errors import ProblemError
from remat.files import write_atomic, writing
from remat.planning.experiment_table import COLUMNS, VERSION, ExperimentRow, Sweep
from remat.version import __version__


@dataclass(slots=True, eq=False)
class Journal:
    """The finished rows, by their keys."""

    known: dict[tuple[str, ...], ExperimentRow] = field(default_factory=dict)
    _file: IO[str] | None = None

    def add(self, row: ExperimentRow) -> None:
        """Write a row; a row with a known key is not written twice.

        Raises:
            ProblemError: it cannot be written.
        """
        if row.key in self.known:
            return
        self.known[row.key] = row
        if self._file is not None:
            hint = "; with room for it the same sweep goes on from the rows that it has"
            with writing(self._file.name, hint):
                self._file.write(json.dumps(asdict(row)) + "\n")
                self._file.flush()
                os.fsync(self._file.fileno())


@contextlib.contextmanager
def opened(table: Path | None) -> Iterator[Journal]:
    """The journal of a table, ``TABLE.partial``, for one sweep at a time; it goes when the sweep has ended.

    It holds a line of JSON for each row, behind one that names the version. A last line that was cut off is left
    out. Without a table nothing is written.

    Raises:
        ProblemError: another sweep has it, it was written by other versions, or it cannot be written.
    """
    if table is None:
        yield Journal()
        return
    path = table.with_name(f"{table.name}.partial")
    lock = FileLock(table.with_name(f"{table.name}.lock"))
    with writing(table):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ProblemError(
                f"another sweep is writing '{table}': wait for it, or name another output"
            ) from None
    try:
        rows = Sweep.load(table).rows if table.exists() else ()
        head = {"remat_sweep": VERSION, "remat": __version__, "torch": torch.__version__}
        lines = _lines(path) or [head]
        if lines[0] != head:
            raise ProblemError(
                f"'{path}' was written by other versions ({lines[0]}) than these ({head}): finish it there, or "
                "delete it to begin anew"
            )
        rows = (*rows, *map(ExperimentRow.from_dict, lines[1:]))
        with writing(path):
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))
            file = path.open("a", encoding="utf-8")
        try:
            yield Journal({row.key: row for row in rows}, file)
        finally:
            with contextlib.suppress(OSError):  # the end of a row that could not be written
                file.close()
        path.unlink(missing_ok=True)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _lines(path: Path) -> list[Any]:
    """The lines of a journal before the first damaged one; later rows are planned again."""
    if not path.exists():
        return []
    lines: list[Any] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines(keepends=True):
        try:
            data = json.loads(line) if line.endswith("\n") else None
        except (ValueError, RecursionError):
            break
        if not isinstance(data, dict) or (lines and set(data) != set(COLUMNS)):
            break
        lines.append(data)
    return lines
