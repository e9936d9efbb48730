"""Progress of a compilation: stage and seconds on a terminal, and one line at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Self, TextIO

from remat.planning.plan import Plan
from remat.units import format_bytes

#: Seconds that a compilation is silent for.
SILENT_S = 2.0
#: Set to anything but 0, it keeps compilations silent.
QUIET = "REMAT_QUIET"
_CLEAR = "\r\x1b[2K"


class CompileProgress:
    """Shows on a terminal what a compilation does, once it has taken `SILENT_S`.

    Nothing is written to what is no terminal.

    Args:
        name: what is compiled.
        stream: standard error by default.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, stream or sys.stderr
        shown = os.environ.get(QUIET, "0") in ("", "0")
        # A closed stream does not even answer whether it is a terminal.
        is_open = not getattr(self._stream, "closed", True)
        self._is_live = shown and is_open and self._stream.isatty()
        self._stage, self._started = "tracing forward and backward", time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="remat-progress", daemon=True)
        self._shown = False

    def stage(self, text: str) -> None:
        """Show the stage that begins."""
        self._stage = text

    def finish(self, plan: Plan) -> None:
        """Print the figures of the plan, if progress was shown."""
        self._stop()
        if self._shown:
            self._write(f"remat: {closing_line(plan)}; details: remat.plans()[-1].explain()\n")

    def __enter__(self) -> Self:
        if self._is_live:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _show(self) -> None:
        wait = SILENT_S
        while not self._done.wait(wait):
            self._shown, wait = True, 1.0
            elapsed = time.monotonic() - self._started
            # The cursor goes back, so that a warning is written over the line.
            self._write(f"{_CLEAR}remat: {self._name}: {self._stage}, {elapsed:.0f} s\r")

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._done.set()
            self._thread.join()
            if self._shown:
                self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # closed
            self._is_live = False


def closing_line(plan: Plan) -> str:
    """One line on a plan: its peak, the peak without remat, and the time that the plan adds to the step."""
    found = plan.before_after
    peak, without = found.peak_bytes, found.without_peak_bytes
    about = ""
    if plan.planned_peak_bytes:  # Inductor compiled it; the step without remat is estimated
        peak, without, about = plan.peak_bytes, plan.without_expected_bytes, "about "
    line = f"'{plan.graph}': peak {format_bytes(peak)}"
    if without:
        line += f" instead of {about}{format_bytes(without)}"
    return line if found.more is None else f"{line}, step {found.more:+.1%}"
