"""The graphs between passes as text: in numbered files, on a stream, or as what changed."""

from __future__ import annotations

import difflib
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from remat.errors import RematError
from remat.files import write_whole
from remat.graph.snapshot import Stamp
from remat.passes.core.control import Composite
from remat.passes.core.pipeline import Instrument

if TYPE_CHECKING:
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.core.state import PassResult, State


def state_text(state: State) -> str:
    """The graphs of a state as text: the joint graph or, after partitioning, forward and backward."""
    from remat.graph.text import print_graph, print_joint

    if state.forward is None or state.backward is None:
        return print_joint(state.joint)
    return print_graph(state.forward, "forward") + "\n" + print_graph(state.backward, "backward")


def state_stamps(state: State) -> tuple[Stamp, ...]:
    """Stamps of the graphs that `state_text` shows."""
    if state.forward is None or state.backward is None:
        return (Stamp.of(state.joint.graph),)
    return (Stamp.of(state.forward.graph), Stamp.of(state.backward.graph))


def to_stderr(text: str) -> None:
    """Writes a line, or several, to standard error."""
    print(text, file=sys.stderr)


class _Shown(Instrument):
    """Base of what shows the graphs before or after passes; composites are shown by their parts.

    Passes are numbered from 1 as they run, shown or not.
    """

    def __init__(
        self, *, before: bool = False, after: bool = True, only: Iterable[str] | None = None
    ) -> None:
        self._before, self._after = before, after
        self._only = None if only is None else tuple(only)
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
        if isinstance(p, Composite):
            return
        self._number += 1
        if self._before and self._is_meant(p):
            self.show(self._number, path, "before", state_text(state))

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        if self._after and not isinstance(p, Composite) and self._is_meant(p):
            self.show(self._number, path, "after", state_text(result.state))

    def _is_meant(self, p: Pass) -> bool:
        return self._only is None or p.name in self._only

    @abstractmethod
    def show(self, number: int, path: tuple[str, ...], when: str, text: str) -> None:
        """Shows the text of the graphs before or after the pass of a number."""


class Dumps(_Shown):
    """Writes the graphs to numbered files, such as ``003-cse.after.txt``.

    A pass inside of others is named with them: ``004-fixpoint.dce.after.txt``.

    Args:
        folder: where to; made if it is not there.
        before: also write the graph before each pass.
        after: write the graph after each pass.
        only: names of the passes to write for; all where None.
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

    def show(self, number: int, path: tuple[str, ...], when: str, text: str) -> None:
        file = self.folder / f"{number:03}-{'.'.join(path)}.{when}.txt"
        try:
            write_whole(file, text)
        except OSError as error:
            raise RematError(f"dump '{file}' cannot be written: {error.strerror}") from error


class Printed(_Shown):
    """Prints the graphs, with a line above each that says which pass.

    Args:
        write: what prints a text; to standard error by default.
        before: also print the graph before each pass.
        after: print the graph after each pass.
        only: names of the passes to print for; all where None.
    """

    def __init__(
        self,
        *,
        write: Callable[[str], None] = to_stderr,
        before: bool = False,
        after: bool = True,
        only: Iterable[str] | None = None,
    ) -> None:
        super().__init__(before=before, after=after, only=only)
        self._write = write

    def show(self, number: int, path: tuple[str, ...], when: str, text: str) -> None:
        self._write(f"# *** graph {when} pass {number}, {' > '.join(path)} ***\n{text.rstrip()}")


class PrintChanged(Instrument):
    """Prints what each pass changed as a unified diff, and a line for those that changed nothing.

    A pass that splits the graph is followed by both halves, which a diff would not explain.

    Args:
        write: what prints a text; to standard error by default.
        context: lines around each change.
    """

    def __init__(self, *, write: Callable[[str], None] = to_stderr, context: int = 3) -> None:
        self._write, self._context = write, context
        self._text: str | None = None
        self._stamps: tuple[Stamp, ...] = ()

    def start(self, pipeline: Pipeline, state: State) -> None:
        self._text = None

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        if isinstance(p, Composite):
            return
        if self._text is None:
            self._text = state_text(state)
        self._stamps = state_stamps(state)

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        if isinstance(p, Composite):
            return
        name = " > ".join(path)
        stamps = state_stamps(result.state)
        was_split = len(stamps) != len(self._stamps)
        pairs = zip(self._stamps, stamps, strict=False)
        if not was_split and all(a.difference(b) is None for a, b in pairs):
            self._write(f"# *** {name}: unchanged ***")
            return
        before, self._text = self._text or "", state_text(result.state)
        if was_split:
            self._write(f"# *** {name}: split ***\n{self._text.rstrip()}")
            return
        lines = list(
            difflib.unified_diff(
                before.splitlines(),
                self._text.splitlines(),
                f"before {name}",
                f"after {name}",
                lineterm="",
                n=self._context,
            )
        )
        shown = lines or ["(nothing that the text shows)"]
        self._write("\n".join((f"# *** {name}: changed ***", *shown)))
