"""Run a search in native code in a thread, so that Ctrl-C ends the wait for the search."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def interruptible(search: Callable[[], T], stop: Callable[[], object] | None = None) -> T:
    """Run a search in a thread, and return its result; Ctrl-C in the main thread ends the wait.

    The search must release the GIL. The function ``stop`` makes a running search return soon. Without
    ``stop``, an interrupted search runs on until its own limit, or until the process exits.
    """
    # Python handles a signal between its own instructions, so the main thread must not be inside of native code.
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(search())
        except BaseException as error:
            result.set_exception(error)

    # A daemon, so that the process does not wait at its exit for a search that cannot be stopped.
    thread = threading.Thread(target=run, name="remat-search", daemon=True)
    thread.start()
    try:
        return result.result()
    except KeyboardInterrupt:
        if stop is not None:
            stop()
            thread.join()
        raise
