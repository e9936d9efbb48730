"""Journal of a sweep: write each row to disk as soon as it is planned, so that a sweep can resume after a crash."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from remat.errors import ProblemError
from remat.experiments.table import ExperimentRow, Sweep, read_rows, versions
from remat.files import writing


@dataclass(slots=True, eq=False)
class Journal:
    """Finished rows of a sweep. If the sweep has an output, each added row is also appended to the journal's file.

    Attributes:
        rows: dict from `ExperimentRow.key` to the finished row.
    """

    rows: dict[tuple[str, ...], ExperimentRow] = field(default_factory=dict)
    _file: IO[str] | None = None

    def add(self, row: ExperimentRow) -> None:
        """Add a finished row of the sweep, and append it to the file; do nothing if a row with the same key exists.

        Raises:
            ProblemError: the file cannot be written.
        """
        if row.key in self.rows:
            return
        self.rows[row.key] = row
        if self._file is not None:
            hint = "; with room for it the same sweep goes on from the rows that it has"
            with writing(self._file.name, hint):
                self._file.write(json.dumps(asdict(row)) + "\n")
                self._file.flush()
                # Without fsync, a crash of the machine could lose the row.
                os.fsync(self._file.fileno())


def journal_of(table: Path) -> Path:
    """Return the file in JSON Lines that a resumed sweep reads: the file of the table, or a file beside it."""
    return table if table.suffix == ".jsonl" else table.with_name(f"{table.name}.jsonl")


@contextlib.contextmanager
def opened(table: Path | None) -> Iterator[Journal]:
    """Open the journal of a sweep's table, and lock the table against other sweeps.

    Args:
        table: path of the sweep's table; None: rows are not written to disk.

    Yields:
        A journal with the rows of earlier sweeps.

    Raises:
        ProblemError: another sweep has locked the table; other versions of remat or PyTorch wrote the journal; the
            table has no journal; or the journal cannot be read or written.
    """
    if table is None:
        yield Journal()
        return
    path = journal_of(table)
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
        if table.exists() and not path.exists():
            raise ProblemError(
                f"'{table}' exists, but not '{path}', which holds the rows of a sweep: name another output"
            )
        head, rows = read_rows(path) if path.exists() else (versions(), ())
        if head != versions():
            raise ProblemError(
                f"'{path}' was written by other versions ({head}) than these ({versions()}): go on there, or name "
                "another output"
            )
        # A crash may have left a damaged last line. The file is rewritten without it, so that the next row begins on a
        # line of its own.
        Sweep(rows=rows).save(path)
        with writing(path):
            file = path.open("a", encoding="utf-8")
        try:
            yield Journal({row.key: row for row in rows}, file)
        finally:
            with contextlib.suppress(OSError):
                # Closing tries again to write a row whose writing has failed.
                file.close()
    finally:
        # The lock file is deleted before the lock is released: afterwards, another sweep could own the file.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
