"""Show the stage and the seconds of a compilation on a terminal, then one line with the result."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Self, TextIO

from remat.planning.plan import Plan
from remat.units import format_bytes

#: Progress is shown once a compilation has taken this many seconds.
SILENT_S = 2.0
#: Name of an environment variable. If its value is a nonempty text other than 0, no progress is shown.
QUIET = "REMAT_QUIET"
#: Terminal codes that clear the current line.
_CLEAR = "\r\x1b[2K"


class CompileProgress:
    """Show the stage of a compilation on a terminal, if the compilation takes more than `SILENT_S` seconds.

    Nothing is written if the stream is not a terminal.

    Args:
        name: name of the compiled graph.
        stream: the stream to write to; by default standard error.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, stream or sys.stderr
        shown = os.environ.get(QUIET, "0") in ("", "0")
        # `isatty` of a closed stream raises.
        is_open = not getattr(self._stream, "closed", True)
        self._is_live = shown and is_open and self._stream.isatty()
        self._stage, self._started = "tracing forward and backward", time.monotonic()
        self._done = threading.Event()
        # A daemon, so that the thread cannot keep the process alive.
        self._thread = threading.Thread(target=self._show, name="remat-progress", daemon=True)
        self._shown = False

    def stage(self, text: str) -> None:
        """Set the stage of the compilation that the terminal shows from now on."""
        self._stage = text

    def finish(self, plan: Plan) -> None:
        """Stop showing the compilation's progress; if any was shown, print one line with the plan's peak and time."""
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
        """Write the compilation's stage and elapsed seconds every second; a thread runs this method."""
        wait = SILENT_S
        while not self._done.wait(wait):
            self._shown, wait = True, 1.0
            elapsed = time.monotonic() - self._started
            # The cursor returns to the start of the line, so that a warning overwrites the progress.
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
        except (OSError, ValueError):  # the stream was closed meanwhile
            self._is_live = False


def closing_line(plan: Plan) -> str:
    """Return one line with a plan's peak, the peak without remat, and the change of the step time in percent."""
    change = plan.before_after
    peak, without = change.peak_bytes, change.without_peak_bytes
    about = ""
    if plan.planned_peak_bytes:
        # The peak of the code is known; the peak without remat is an estimate.
        peak, without, about = plan.peak_bytes, plan.without_estimated_bytes, "about "
    line = f"'{plan.graph}': peak {format_bytes(peak)}"
    if without:
        line += f" instead of {about}{format_bytes(without)}"
    return line if change.more is None else f"{line}, step {change.more:+.1%}"
