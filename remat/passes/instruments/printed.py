"""Show the graphs between passes: on a stream or in files, whole or as diffs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from remat.errors import RematError
from remat.files import write_file
from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Instrument, Pipeline, Run
from remat.passes.core.state import PassResult, State


def state_text(state: State) -> str:
    """Return the text of a state's joint graph or, after partitioning, of the forward and backward graphs."""
    from remat.graph.text import print_graph, print_joint

    if state.forward is None:
        return print_joint(state.joint)
    return "\n".join(print_graph(module, name) for name, module in state.modules.items())


def to_stderr(text: str) -> None:
    """Write a text of one or more lines to standard error."""
    print(text, file=sys.stderr)


class Printed(Instrument):
    """Instrument that shows the graphs before or after each pass, or the change that each pass makes.

    Passes are numbered from 1 in the order of their runs, including passes that ``only`` leaves out.
    For a `Fixpoint`, the graphs before or after its inner passes are shown.

    Args:
        only: name or names of the passes at which the graphs are shown; None: all passes.
        changed: whether to show, instead of the graphs after a pass, a unified diff from the graphs
            before the pass. After a pass that partitions the joint graph, both new graphs are shown
            whole.
        to: function that prints a text; or a folder, created if missing, for numbered files such as
            ``003-cse.after.txt``. By default, texts are printed to standard error.
        before: whether to show the graphs before each pass.
        after: whether to show the graphs, or the change, after each pass.

    Raises:
        RematError: when a run starts, if ``only`` has a name that no pass of the pipeline has, or if the
            folder cannot be created; during a run, if a file cannot be written.
    """

    only_inner: ClassVar[bool] = True

    def __init__(
        self,
        *,
        only: str | Iterable[str] | None = None,
        changed: bool = False,
        to: Callable[[str], None] | str | Path = to_stderr,
        before: bool = False,
        after: bool = True,
    ) -> None:
        self._only = (only,) if isinstance(only, str) else None if only is None else tuple(only)
        self._changed, self._to = changed, Path(to) if isinstance(to, str) else to
        self._before, self._after = before, after
        # A second run does not start from 1, so that its files do not replace those of the first run.
        self._number = 0

    def around_pipeline(self, pipeline: Pipeline, state: State, run: Run) -> PassResult:
        names = {p.name for p in pipeline.flat()}
        for name in self._only or ():
            if name not in names:
                raise RematError(
                    f"no pass '{name}' to show the graph at in pipeline '{pipeline}'; it has: "
                    f"{', '.join(sorted(names))}",
                    option="only",
                )
        if isinstance(self._to, Path):
            try:
                self._to.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RematError(
                    f"no dumps can be written to '{self._to}': {error.strerror}; give a folder"
                ) from error
        return run(state)

    def around_pass(self, p: Pass, state: State, path: tuple[str, ...], run: Run) -> PassResult:
        # Counted even if `only` leaves the pass out, so that numbers do not depend on `only`.
        self._number += 1
        if self._only is not None and p.name not in self._only:
            return run(state)
        was_joint = state.forward is None
        before = state_text(state) if self._before or self._changed else ""
        if self._before:
            self._show(path, "before", before)
        result = run(state)
        if self._changed:
            is_split = was_joint and result.state.forward is not None
            self._show_change(path, before, state_text(result.state), is_split=is_split)
        elif self._after:
            self._show(path, "after", state_text(result.state))
        return result

    def _show(self, path: tuple[str, ...], when: str, text: str, title: str = "") -> None:
        if isinstance(self._to, Path):
            file = self._to / f"{self._number:03}-{'.'.join(path)}.{when}.txt"
            write_file(file, text, "dump")
        else:
            title = title or f"graph {when} pass {self._number}, {' > '.join(path)}"
            self._to(f"# *** {title} ***\n{text}".rstrip())

    def _show_change(
        self, path: tuple[str, ...], before: str, text: str, *, is_split: bool
    ) -> None:
        name = " > ".join(path)
        verb = "split" if is_split else "unchanged" if before == text else "changed"
        if not is_split:
            lines = difflib.unified_diff(
                before.splitlines(),
                text.splitlines(),
                f"before {name}",
                f"after {name}",
                lineterm="",
            )
            text = "\n".join(lines)
        self._show(path, verb, text, f"{name}: {verb}")
