"""Call HiGHS through ``scipy.optimize.milp`` without its stray debug output.

HiGHS prints debug lines from C++ regardless of its options, and other programs parse standard
output. During a call, file descriptor 1 therefore points to a temporary file, **for all threads of
this process**. A lock admits one call at a time. Lines that other threads print during the call
appear after it. A process forked during the call has the real standard output. If another thread
starts a ``subprocess`` during the call, and the program inherits standard output, the program's
output may be lost. Give such a program a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from remat.solvers.interrupts import interruptible

_NOISE = b"HighsMipSolverData::"


class _Redirect:
    """State of the redirection of file descriptor 1: a lock, and a copy of the real descriptor."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.true_stdout: int | None = None

    def end_in_child(self) -> None:
        """End the redirection in a forked child, where the redirecting thread does not exist."""
        # A thread that does not exist in the child may hold the old lock.
        self.lock = threading.Lock()
        if self.true_stdout is not None:
            os.dup2(self.true_stdout, 1)
            self.true_stdout = None


_redirect = _Redirect()
if os.name == "posix":
    os.register_at_fork(after_in_child=_redirect.end_in_child)


def milp(*args: Any, **kwargs: Any) -> Any:
    """Call `scipy.optimize.milp` with the same arguments and result; drop HiGHS's debug output.

    Ctrl-C ends the call at once. SciPy cannot stop HiGHS, so HiGHS's thread runs on to its limit,
    and its debug output is no longer dropped.
    """
    from scipy import optimize

    with quiet_stdout():
        return interruptible(lambda: optimize.milp(*args, **kwargs))


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Drop HiGHS's debug lines from standard output in a ``with`` block; print other output at its end."""
    if os.name != "posix":
        yield
        return
    with _redirect.lock, contextlib.ExitStack() as opened:
        caught = None
        with contextlib.suppress(OSError):
            caught = opened.enter_context(tempfile.TemporaryFile())
        if caught is None:  # no temporary folder: show the debug lines
            yield
            return
        libc = ctypes.CDLL(None)
        _flush(libc)  # text buffered before the call must not land in the temporary file
        _redirect.true_stdout = true = os.dup(1)
        os.dup2(caught.fileno(), 1)
        try:
            yield
        finally:
            _flush(libc)
            os.dup2(true, 1)
            _redirect.true_stdout = None
            caught.seek(0)
            with open(true, "wb") as stdout:
                stdout.writelines(line for line in caught if _NOISE not in line)


def _flush(libc: ctypes.CDLL) -> None:
    with contextlib.suppress(AttributeError, ValueError):  # sys.stdout is None or closed
        sys.stdout.flush()
    libc.fflush(None)
