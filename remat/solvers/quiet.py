"""Keeping a native library's stray prints out of standard output, where machines read."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()


@contextlib.contextmanager
def quiet_stdout(*, noise: str) -> Iterator[None]:
    """Drop the lines that contain ``noise`` from what is written to file descriptor 1 meanwhile.

    HiGHS prints debug lines from C++ whatever its options say. Everything else, from whatever
    thread, is written out when the block ends.
    """
    if os.name != "posix":
        yield
        return
    with _LOCK, tempfile.TemporaryFile() as caught:
        libc = ctypes.CDLL(None)
        _flush(libc)
        saved = os.dup(1)
        os.dup2(caught.fileno(), 1)
        try:
            yield
        finally:
            _flush(libc)
            os.dup2(saved, 1)
            os.close(saved)
            caught.seek(0)
            for line in caught.read().splitlines(keepends=True):
                if noise.encode() not in line:
                    os.write(1, line)


def _flush(libc: ctypes.CDLL) -> None:
    with contextlib.suppress(AttributeError, ValueError):  # no stdout, or a closed one
        sys.stdout.flush()
    libc.fflush(None)
