"""The stages of a command on standard error, each with the time that it took."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Self

import click
from rich.console import Console
from rich.status import Status

#: Key of the context of a command under which it is noted that nothing is to be said.
QUIET = "remat.quiet"
#: Seconds of work on a terminal that go by before a spinner appears.
DELAY_S = 0.5


class Progress:
    """Says on standard error what is being done, one line a stage, once it is done and took so long.

    On a terminal the stage at hand is shown with a spinner and the seconds that have passed. Nothing is
    written under ``--quiet``.
    """

    def __init__(self, delay_s: float = DELAY_S) -> None:
        context = click.get_current_context(silent=True)
        self._quiet = context is not None and bool(context.meta.get(QUIET))
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        spins = console.is_terminal and not self._quiet
        self._status = Status("", console=console) if spins else None
        self._delay_s = delay_s
        self._stage, self._detail, self._started = "", "", 0.0
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._lock = threading.Lock()
        self._listening = contextlib.ExitStack()

    def step(self, text: str) -> None:
        """Ends the stage at hand and names the next one."""
        self._end_stage()
        self._stage, self._detail, self._started = text, "", time.perf_counter()

    def detail(self, text: str) -> None:
        """Says where the stage at hand is: on a terminal only."""
        self._detail = text

    def __enter__(self) -> Self:
        if self._status is not None:
            from remat.graph.costs import reporting

            self._listening.enter_context(reporting(self.detail))
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._listening.close()
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()
        with self._lock:
            if self._status is not None:
                self._status.stop()
        self._end_stage("" if kind is None else ", not finished")
        sys.stderr.flush()

    def _end_stage(self, note: str = "") -> None:
        if not self._stage or self._quiet:
            return
        took_s = time.perf_counter() - self._started
        line = f"{took_s:6.1f} s  {self._stage}{note}"
        self._stage = ""
        if self._status is None:
            click.echo(line, err=True)
            return
        with self._lock:
            self._status.console.print(line, style="dim")

    def _tick(self) -> None:
        """Keeps the seconds of the spinner going."""
        begun, shown = time.perf_counter(), False
        while not self._ended.wait(0.1):
            now = time.perf_counter()
            with self._lock:
                if self._status is None or self._ended.is_set() or now - begun < self._delay_s:
                    continue
                text = f"{self._stage}: {self._detail}" if self._detail else self._stage
                self._status.update(f"{now - self._started:.0f} s  {text} …")
                if not shown:
                    self._status.start()
                    shown = True
