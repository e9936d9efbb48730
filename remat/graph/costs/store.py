"""Measured times, kept for this process and on disk for every other one."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Mapping
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

#: An environment, and a call in it.
Place = tuple[str, str]


class CostWarning(RuntimeWarning):
    """A cache of measured costs that cannot be used; planning goes on without."""


class Store:
    """Picoseconds by environment and call, backed by a file that many processes share.

    The first value that reaches the file stands: every process that shares it plans by the same
    figures, whoever measured them.

    Attributes:
        path: the file; None keeps everything in memory.
        times: times in picoseconds, by environment and call.
        unmeasured: why a call was not measured, likewise; never written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.times: dict[Place, int] = {}
        self.unmeasured: dict[Place, str] = {}
        self._warned = False

    def lacks(self, place: Place) -> bool:
        """Whether a call was neither measured nor given up."""
        return place not in self.times and place not in self.unmeasured

    def merge(self, fresh: Mapping[Place, int]) -> None:
        """Writes new times, and reads those in the file; one that is no database is put aside."""
        self.times = {**fresh, **self.times}
        if self.path is None:
            return
        try:
            try:
                found = _exchange(self.path, fresh)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                aside = self.path.with_name(f"{self.path.name}.corrupt")
                os.replace(self.path, aside)
                self._warn(f"is corrupt ({error}): it is rebuilt, and kept as '{aside.name}'")
                found = _exchange(self.path, fresh)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            self._warn(f"cannot be used ({reason}): times are kept for this process only")
            return
        self.times.update(found)

    def _warn(self, message: str) -> None:
        """Warns once: what is wrong with a folder shows again and again, and its remedy is one."""
        if not self._warned:
            self._warned = True
            text = f"the cache of measured costs '{self.path}' {message}. {_REMEDY}"
            warn(text, CostWarning, stacklevel=2)


def _exchange(path: Path, fresh: Mapping[Place, int]) -> dict[Place, int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, timeout=LOCK_S)) as database, database:
        database.execute(_TABLE)
        rows = [(*place, ps) for place, ps in sorted(fresh.items())]
        database.executemany("INSERT OR IGNORE INTO times VALUES (?, ?, ?)", rows)
        found = database.execute("SELECT environment, call, ps FROM times")
        return {(environment, call): ps for environment, call, ps in found}


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
