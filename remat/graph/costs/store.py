"""Measured times, kept for this process and on disk for every other one."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from remat.errors import warn

#: Seconds to wait for other processes that write to the file.
LOCK_S = 2.0

_NAME = "profile-v2.sqlite"
_REMEDY = "If it happens again, point REMAT_CACHE to another folder, which can be written"
_TABLE = """CREATE TABLE IF NOT EXISTS times (
    environment TEXT NOT NULL, call TEXT NOT NULL, ps INTEGER NOT NULL,
    PRIMARY KEY (environment, call),
    CHECK (typeof(ps) = 'integer' AND ps > 0)
)"""

Row = tuple[str, str, int]


class CostWarning(RuntimeWarning):
    """A cache of measured costs that cannot be used; planning goes on without."""


class Store:
    """Picoseconds by environment and call, backed by a file that many processes share.

    The first value that reaches the file stands: every process that shares it plans by the same
    figures, whoever measured them.

    Attributes:
        path: the file; None keeps everything in memory.
        times: times in picoseconds.
        unmeasured: why a call was not measured, by environment and call; never written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.times: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.unmeasured: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._warned = False

    def lacks(self, environment: str, key: str) -> bool:
        """Whether a call was neither measured nor given up."""
        return key not in self.times[environment] and key not in self.unmeasured[environment]

    def load(self) -> None:
        """Reads the times in the file."""
        self._exchange(())

    def merge(self, environment: str, fresh: dict[str, int]) -> None:
        """Writes new times, and reads those that other processes have written."""
        self.times[environment] = {**fresh, **self.times[environment]}
        self._exchange([(environment, call, ps) for call, ps in sorted(fresh.items())])

    def _exchange(self, rows: Iterable[Row]) -> None:
        """Writes new rows, reads all; a file that is no database is put aside."""
        if self.path is None:
            return
        try:
            try:
                found = _exchange(self.path, rows)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                aside = self.path.with_name(f"{self.path.name}.corrupt")
                os.replace(self.path, aside)
                self._warn(f"is corrupt ({error}): it is rebuilt, and kept as '{aside.name}'")
                found = _exchange(self.path, rows)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            self._warn(f"cannot be used ({reason}): times are kept for this process only")
            return
        for environment, call, ps in found:
            self.times[environment][call] = ps

    def _warn(self, message: str) -> None:
        """Warns once: what is wrong with a folder shows again and again, and its remedy is one."""
        if not self._warned:
            self._warned = True
            text = f"the cache of measured costs '{self.path}' {message}. {_REMEDY}"
            warn(text, CostWarning, stacklevel=2)


def _exchange(path: Path, rows: Iterable[Row]) -> list[Row]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, timeout=LOCK_S)) as database, database:
        database.execute(_TABLE)
        database.executemany("INSERT OR IGNORE INTO times VALUES (?, ?, ?)", rows)
        return database.execute("SELECT environment, call, ps FROM times").fetchall()


def cache_path() -> Path | None:
    """The file: under ``$REMAT_CACHE``, or ``remat`` in the user's cache folder; None without one."""
    folder = os.environ.get("REMAT_CACHE")
    if folder:
        return Path(folder) / _NAME
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "remat" / _NAME
    try:
        return Path.home() / ".cache" / "remat" / _NAME
    except RuntimeError:  # there is no home folder
        return None


@functools.cache
def store(path: Path | None) -> Store:
    """The one store of this process for a file."""
    return Store(path)
