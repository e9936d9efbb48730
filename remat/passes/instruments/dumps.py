"""Instruments that show the graphs between passes: in files, on a stream, or as diffs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from remat.errors import RematError
from remat.files import write_file
from remat.passes.core.pipeline import Instrument

if TYPE_CHECKING:
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.core.state import PassResult, State


def state_text(state: State) -> str:
    """Return the joint graph as text or, after partitioning, the forward and backward graphs."""
    from remat.graph.text import print_graph, print_joint

    if state.forward is None:
        return print_joint(state.joint)
    return "\n".join(print_graph(module, name) for name, module in state.modules.items())


def to_stderr(text: str) -> None:
    """Write one or more lines to standard error."""
    print(text, file=sys.stderr)


class Printed(Instrument):
    """Instrument that prints the graphs before or after each pass, below a line that names the pass.

    Passes are numbered from 1 in the order in which they run, including passes without a printed
    graph. For a `Fixpoint`, the graphs are printed before or after its inner passes.

    Args:
        write: function that prints a text; by default to standard error.
        before: whether to print the graphs before each pass.
        after: whether to print the graphs after each pass.
        only: names of the passes before or after which the graphs are printed; None: all passes.

    Raises:
        RematError: when a run starts, if ``only`` has a name that no pass of the pipeline has.
    """

    only_inner: ClassVar[bool] = True

    def __init__(
        self,
        *,
        write: Callable[[str], None] = to_stderr,
        before: bool = False,
        after: bool = True,
        only: Iterable[str] | None = None,
    ) -> None:
        self._write, self._before, self._after = write, before, after
        self._only = None if only is None else tuple(only)
        # `start` does not reset the number, so files of a second run do not replace earlier files.
        self._number = 0

    def start(self, pipeline: Pipeline, state: State) -> None:
        known = {p.name for p in pipeline.flat()}
        for name in self._only or ():
            if name not in known:
                raise RematError(
                    f"no pass '{name}' to show the graph at in pipeline '{pipeline}'; it has: "
                    f"{', '.join(sorted(known))}"
                )

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        # Counted even if `only` leaves the pass out, so that numbers do not depend on `only`.
        self._number += 1
        if self._before and self._is_meant(p):
            self.show(path, "before", state_text(state))

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        if self._after and self._is_meant(p):
            self.show(path, "after", state_text(result.state))

    def _is_meant(self, p: Pass) -> bool:
        return self._only is None or p.name in self._only

    def show(self, path: tuple[str, ...], when: str, text: str) -> None:
        """Print the graphs before or after a pass.

        Args:
            path: names of the enclosing passes, and last the name of the pass.
            when: ``"before"`` or ``"after"``.
            text: the graphs as text.
        """
        name = " > ".join(path)
        self._write(f"# *** graph {when} pass {self._number}, {name} ***\n{text.rstrip()}")


class Dumps(Printed):
    """Instrument that writes the graphs to numbered files, such as ``003-cse.after.txt``.

    The name of an inner pass includes the enclosing passes: ``004-fixpoint.dce.after.txt``.

    Args:
        folder: folder of the files; created if missing.
        before: as in `Printed`.
        after: as in `Printed`.
        only: as in `Printed`.

    Raises:
        RematError: during a run, if the folder or a file cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        before: bool = False,
        after: bool = True,
        only: Iterable[str] | None = None,
    ) -> None:
        super().__init__(before=before, after=after, only=only)
        self.folder = Path(folder)

    def start(self, pipeline: Pipeline, state: State) -> None:
        super().start(pipeline, state)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RematError(
                f"no dumps can be written to '{self.folder}': {error.strerror}; give a folder"
            ) from error

    def show(self, path: tuple[str, ...], when: str, text: str) -> None:
        file = self.folder / f"{self._number:03}-{'.'.join(path)}.{when}.txt"
        write_file(file, text, "dump")


class PrintChanged(Instrument):
    """Instrument that prints a unified diff of the graphs for each pass.

    For a pass that changed nothing, one line says so. For a pass that partitions the joint graph,
    the forward and backward graphs are printed whole, because a diff would not be readable.

    Args:
        write: function that prints a text; by default to standard error.
        context: number of unchanged lines around each change.
    """

    only_inner: ClassVar[bool] = True

    def __init__(self, *, write: Callable[[str], None] = to_stderr, context: int = 3) -> None:
        self._write, self._context = write, context
        # The text after one pass serves as the text before the next, so each graph is printed once.
        self._text: str | None = None
        self._was_joint = True

    def start(self, pipeline: Pipeline, state: State) -> None:
        self._text = None

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        if self._text is None:
            self._text = state_text(state)
        self._was_joint = state.forward is None

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        name = " > ".join(path)
        before = text = self._text or ""
        if result.modified:
            self._text = text = state_text(result.state)
        if before == text:
            self._write(f"# *** {name}: unchanged ***")
        elif self._was_joint and result.state.forward is not None:
            self._write(f"# *** {name}: split ***\n{text.rstrip()}")
        else:
            lines = difflib.unified_diff(
                before.splitlines(),
                text.splitlines(),
                f"before {name}",
                f"after {name}",
                lineterm="",
                n=self._context,
            )
            self._write("\n".join((f"# *** {name}: changed ***", *lines)))
