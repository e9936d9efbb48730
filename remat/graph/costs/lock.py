"""Keeping other processes out of a file while it is read and replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

#: Seconds to wait for another process's lock before going on without.
LOCK_S = 2.0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes out while a file is read and replaced, by a lock file beside it.

    A lock that cannot be had, for want of a lock file, of support, or because another process
    sits on it, is done without: readers see whole files in any case.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(path.with_name(f".{path.name}.lock").open("a"))
            deadline = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.005)
        yield
