"""Show the stages of a command on standard error, with the seconds that each stage took."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Self

import click
from rich import progress
from rich.console import Console

from remat.cli.output import QUIET


class Progress:
    """Print each finished stage of a command on standard error, with the seconds it took; nothing under ``--quiet``.

    On a terminal, the current stage is shown with a spinner and the elapsed seconds.
    """

    def __init__(self) -> None:
        context = click.get_current_context(silent=True)
        self._quiet = context is not None and bool(context.meta.get(QUIET))
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._live = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.elapsed:.0f} s  {task.description} …", markup=False),
            console=console,
            transient=True,
            redirect_stdout=False,  # results on standard output may go to a file
            disable=self._quiet or not console.is_terminal,
        )
        self._task: progress.TaskID | None = None
        self._stage, self._started = "", 0.0
        self._listening = contextlib.ExitStack()

    def stage(self, name: str) -> None:
        """End the current stage of the command, and begin the next stage."""
        self._end_stage()
        self._stage, self._started = name, time.perf_counter()
        self._task = self._live.add_task(name)

    def detail(self, text: str) -> None:
        """On a terminal, show a text after the name of the command's current stage."""
        if self._task is not None:
            self._live.update(self._task, description=f"{self._stage}: {text}")

    def __enter__(self) -> Self:
        if not self._live.disable:
            from remat.graph.costs import reporting

            self._listening.enter_context(reporting(self.detail))
            self._listening.enter_context(self._live)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end_stage("" if kind is None else ", not finished")
        self._listening.close()
        sys.stderr.flush()

    def _end_stage(self, note: str = "") -> None:
        """Print the seconds and the name of the current stage, with a note after the name."""
        if self._task is None:
            return
        self._live.remove_task(self._task)
        self._task = None
        line = f"{time.perf_counter() - self._started:6.1f} s  {self._stage}{note}"
        if not self._live.disable:
            self._live.console.print(line, style="dim")
        elif not self._quiet:
            click.echo(line, err=True)
