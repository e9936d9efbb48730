"""Measured times, kept for this process and on disk for every other one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from remat.errors import warn
from remat.files import write_whole

#: Version of the file's form; it stands in the file's name and in the file.
VERSION = 1
#: Seconds to wait for another process's lock before going on without.
LOCK_S = 2.0

#: Picoseconds beyond which a time is no time: 2.5 hours.
_MOST_PS = 2**53
_REMEDY = "If it happens again, point REMAT_CACHE to another folder, which can be written"

Times = dict[str, dict[str, int]]


class CostWarning(RuntimeWarning):
    """A cache of measured costs that cannot be used; planning goes on without."""


class Store:
    """Picoseconds by environment and call, backed by a file that many processes share.

    The first value that reaches the file stands: every process that shares it plans by the same
    figures, whoever measured them.

    Attributes:
        path: the file; None keeps everything in memory.
        times: what is known.
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
        """Takes in what the file holds by now."""
        self._take(self._read())

    def merge(self, environment: str, fresh: dict[str, int]) -> None:
        """Writes new times, together with what other processes have written meanwhile."""
        if self.path is None or not fresh:
            self.times[environment].update(fresh)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                on_disk = self._read()
                known = on_disk.setdefault(environment, {})
                new = {k: v for k, v in sorted(fresh.items()) if k not in known}
                known.update(new)
                if new:
                    text = json.dumps({"version": VERSION, "times": on_disk}, indent=1)
                    write_whole(self.path, text + "\n")
        except OSError as error:
            self._warn(
                f"the cache of measured costs '{self.path}' cannot be written "
                f"({error.strerror or error}): times are kept for this process only. {_REMEDY}"
            )
            self.times[environment] = {**fresh, **self.times[environment]}
            return
        self._take(on_disk)

    def _take(self, times: Times) -> None:
        for environment, entries in times.items():
            self.times[environment].update(entries)

    def _read(self) -> Times:
        """What the file holds; a file that is no cache is put aside."""
        if self.path is None:
            return {}
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn(
                f"the cache of measured costs '{self.path}' cannot be read "
                f"({error.strerror or error}): what it holds is measured again. {_REMEDY}"
            )
            return {}
        try:
            return _parse(text)
        except (ValueError, RecursionError) as error:
            aside = self.path.with_name(f"{self.path.name}.corrupt")
            kept = "it cannot be put aside either"
            with contextlib.suppress(OSError):
                os.replace(self.path, aside)
                kept = f"it is kept as '{aside.name}'"
            self._warn(
                f"the cache of measured costs '{self.path}' is corrupt ({error}): it is rebuilt, "
                f"and {kept}. {_REMEDY}"
            )
            return {}

    def _warn(self, message: str) -> None:
        """Warns once: what is wrong with a folder shows again and again, and its remedy is one."""
        if not self._warned:
            self._warned = True
            warn(message, CostWarning, stacklevel=2)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes out while a file is read and replaced, by a lock file beside it.

    A lock that cannot be had, for want of a lock file, of support, or because another process
    holds it, is done without: readers see whole files in any case.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_S, poll_interval=0.005)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            stack.enter_context(lock)
        yield


def _parse(text: bytes) -> Times:
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError(f"it is no JSON object of version {VERSION}")
    times = data.get("times")
    if not isinstance(times, dict) or not all(isinstance(e, dict) for e in times.values()):
        raise ValueError("'times' is no object of objects")
    for entries in times.values():
        for key, value in entries.items():
            if type(value) is not int or not 1 <= value <= _MOST_PS:
                raise ValueError(f"'{key}' takes {value!r}, which is no time in picoseconds")
    return times


def cache_path() -> Path | None:
    """The file: under ``$REMAT_CACHE``, or ``remat`` in the user's cache folder; None without one."""
    name = f"profile-v{VERSION}.json"
    folder = os.environ.get("REMAT_CACHE")
    if folder:
        return Path(folder) / name
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "remat" / name
    try:
        return Path.home() / ".cache" / "remat" / name
    except RuntimeError:  # nobody's home
        return None


@functools.cache
def store(path: Path | None) -> Store:
    """The one store of this process for a file."""
    return Store(path)
