"""Show the stage of a compilation on a terminal, then one line with the result."""

from __future__ import annotations

import os
import sys
import time
from typing import Self, TextIO

from remat.planning.plan import Plan
from remat.units import format_bytes

#: The result of a compilation is shown if the compilation has taken this many seconds.
SILENT_S = 2.0
#: Name of an environment variable. If its value is a nonempty text other than 0, no progress is shown.
QUIET = "REMAT_QUIET"
#: Terminal codes that clear the current line.
_CLEAR = "\r\x1b[2K"


class CompileProgress:
    """Show the stage of a compilation on a terminal, while the ``with`` block of this object runs.

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
        self._started = time.monotonic()

    def stage(self, text: str) -> None:
        """Show the stage of the compilation in place of the last one."""
        # The cursor returns to the start of the line, so that a warning overwrites the stage.
        self._write(f"{_CLEAR}remat: {self._name}: {text}\r")

    def finish(self, plan: Plan) -> None:
        """Print one line with the plan's peak and time, if the compilation has taken more than `SILENT_S` seconds."""
        if self._is_live and time.monotonic() - self._started > SILENT_S:
            self._write(
                f"{_CLEAR}remat: {closing_line(plan)}; details: remat.plans()[-1].explain()\n"
            )

    def __enter__(self) -> Self:
        self.stage("tracing forward and backward")
        return self

    def __exit__(self, *error: object) -> None:
        self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            if self._is_live:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):  # the stream was closed meanwhile
            self._is_live = False


def closing_line(plan: Plan) -> str:
    """Return one line with a plan's peak, the peak without remat, and by how many percent the step time changes."""
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
