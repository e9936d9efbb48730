"""A spinner for long work, and only where somebody is looking."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Self

from rich.console import Console
from rich.status import Status

#: Seconds of work that go by in silence.
DELAY_S = 2.0


class Progress:
    """Says on standard error what is being done, once it has taken a while.

    Nothing is written where standard error is not a terminal, nor by work that ends soon.
    """

    def __init__(self, delay_s: float = DELAY_S) -> None:
        console = Console(stderr=True)
        self._status = Status("", console=console) if console.is_terminal else None
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._done = False
        self._listening = contextlib.ExitStack()

    def step(self, text: str) -> None:
        """Names what comes next."""
        if self._status is not None:
            self._status.update(f"{text} …")

    def __enter__(self) -> Self:
        if self._status is not None:
            from remat.graph.costs import reporting

            self._listening.enter_context(reporting(self.step))
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()
        self._timer.cancel()
        with self._lock:
            self._done = True
            if self._status is not None:
                self._status.stop()
        sys.stderr.flush()

    def _show(self) -> None:
        with self._lock:
            if self._status is not None and not self._done:
                self._status.start()
