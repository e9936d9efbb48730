"""Journal of a sweep: write each row to disk as it completes, so that a sweep can resume after a crash."""

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
from remat.experiments.table import COLUMNS, VERSION, ExperimentRow, Sweep
from remat.files import write_atomic, writing
from remat.version import __version__


@dataclass(slots=True, eq=False)
class Journal:
    """Finished rows of a sweep. If the sweep has an output, each added row is also appended to the journal's file.

    Attributes:
        known: dict from `ExperimentRow.key` to the finished row.
    """

    known: dict[tuple[str, ...], ExperimentRow] = field(default_factory=dict)
    _file: IO[str] | None = None

    def add(self, row: ExperimentRow) -> None:
        """Add a row to `known`, and append it to the file; do nothing if `known` has a row with the same key.

        Raises:
            ProblemError: the file cannot be written.
        """
        if row.key in self.known:
            return
        self.known[row.key] = row
        if self._file is not None:
            hint = "; with room for it the same sweep goes on from the rows that it has"
            with writing(self._file.name, hint):
                self._file.write(json.dumps(asdict(row)) + "\n")
                self._file.flush()
                # So that the row survives a crash of the machine, too.
                os.fsync(self._file.fileno())


@contextlib.contextmanager
def opened(table: Path | None) -> Iterator[Journal]:
    """Open the file ``TABLE.partial``, the journal of a sweep's table, and lock it against other sweeps.

    The first line of the journal names the versions of the format, of remat and of PyTorch. Each further line
    is a row in JSON. Reading stops at the first damaged line. The journal is deleted when the block ends without
    an error.

    Args:
        table: path of the sweep's table; None: rows are not written to disk.

    Yields:
        A journal with the rows of the existing table, and of the journal that an interrupted sweep has left.

    Raises:
        ProblemError: another sweep has locked the journal; other versions of remat or PyTorch wrote the journal; the
            table cannot be read; or the journal cannot be written.
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
            # A crash may have left a damaged last line. The file is rewritten without it, so that the next row begins
            # on a line of its own.
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))
            file = path.open("a", encoding="utf-8")
        try:
            yield Journal({row.key: row for row in rows}, file)
        finally:
            with contextlib.suppress(OSError):
                # Closing tries again to write a row whose writing has failed.
                file.close()
        path.unlink(missing_ok=True)
    finally:
        # The lock file is deleted before the lock is released. Afterwards, it could be that of another sweep.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _lines(path: Path) -> list[Any]:
    """Return one JSON object for each line of a journal, up to the first damaged line; empty if there is no file.

    The first object holds the versions, and each further one is a row.
    """
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
