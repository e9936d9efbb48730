"""Store the measured times of calls, in memory for this process and in a file for all processes."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from remat.errors import warn

#: Seconds to wait for another process that has locked the file.
LOCK_S = 2.0

_NAME = "profile-v2.sqlite"
_REMEDY = "If it happens again, point REMAT_CACHE to another folder, which can be written"
_TABLE = """CREATE TABLE IF NOT EXISTS times (
    environment TEXT NOT NULL, call TEXT NOT NULL, ps INTEGER NOT NULL,
    PRIMARY KEY (environment, call),
    CHECK (typeof(ps) = 'integer' AND ps > 0)
)"""

#: Key of a measured call: text of the environment (PyTorch version, device, precision), and text of the call.
Place = tuple[str, str]


class CostWarning(RuntimeWarning):
    """Warning that the cache of measured costs is unusable, so that planning goes on without the cache."""


class Store:
    """Measured times of calls in picoseconds, backed by a file that many processes share.

    Attributes:
        path: the file; None keeps all times in memory.
        times: time in picoseconds, by (environment, call text).
        unmeasured: reason why a call was not measured, by (environment, call text); never written
            to the file.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.times: dict[Place, int] = {}
        self.unmeasured: dict[Place, str] = {}
        self._warned = False

    def lacks(self, place: Place) -> bool:
        """Return whether the store has neither a call's time nor a reason why the call was not measured."""
        return place not in self.times and place not in self.unmeasured

    def merge(self, fresh: Mapping[Place, int]) -> None:
        """Write new times of calls, in picoseconds, to the file, and read all times from the file.

        If the file cannot be used, a `CostWarning` is issued and the times stay in memory.
        """
        self.times = {**fresh, **self.times}
        if self.path is None:
            return
        try:
            try:
                stored = _exchange(self.path, fresh)
            except sqlite3.DatabaseError as error:
                # An operational error, such as a lock, does not mean that the file is corrupt.
                if isinstance(error, sqlite3.OperationalError):
                    raise
                # A file that is not a database is renamed, and a new file is created.
                aside = self.path.with_name(f"{self.path.name}.corrupt")
                os.replace(self.path, aside)
                self._warn(f"is corrupt ({error}): it is rebuilt, and kept as '{aside.name}'")
                stored = _exchange(self.path, fresh)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            self._warn(f"cannot be used ({reason}): times are kept for this process only")
            return
        # Times in the file win, so that all processes plan with equal times.
        self.times.update(stored)

    def _warn(self, message: str) -> None:
        """Issue a `CostWarning` about the cache file, but only the first time."""
        # A problem with the folder recurs at every access.
        if not self._warned:
            self._warned = True
            text = f"the cache of measured costs '{self.path}' {message}. {_REMEDY}"
            warn(text, CostWarning)


def _exchange(path: Path, fresh: Mapping[Place, int]) -> dict[Place, int]:
    """Write new times to the database file, and return all times in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, timeout=LOCK_S)) as database, database:
        database.execute(_TABLE)
        rows = [(*place, ps) for place, ps in sorted(fresh.items())]
        database.executemany("INSERT OR IGNORE INTO times VALUES (?, ?, ?)", rows)
        # `INSERT OR IGNORE` keeps the row that another process wrote earlier, so all processes read
        # the same time.
        rows_there = database.execute("SELECT environment, call, ps FROM times")
        return {(environment, call): ps for environment, call, ps in rows_there}


def cache_path() -> Path | None:
    """Return the file that caches measured times, in ``$REMAT_CACHE`` or the user's cache; None without a folder."""
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
    """Return the process's only store of measured times for a file; for None, return a store in memory."""
    return Store(path)
