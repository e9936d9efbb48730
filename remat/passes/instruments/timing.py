"""Instrument that measures time and memory growth of a pipeline, as a tree of passes and analyses."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.passes.core.pipeline import Instrument
from remat.passes.core.state import Analysis, watching
from remat.units import columns

if TYPE_CHECKING:
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.core.state import PassResult, State

_STATM = Path("/proc/self/statm")


@dataclass(slots=True, eq=False)
class Timed:
    """Node of the timing tree: one pass or analysis, summed over its runs inside the parent node.

    Attributes:
        name: name of the pass; the name of an analysis is in parentheses.
        runs: number of finished runs, including failed ones.
        total_s: seconds of all runs of the pass or analysis, including the nodes in ``inside``.
        grown_bytes: growth of the process's resident memory in bytes, including the nodes in
            ``inside``.
        inside: nodes of the passes and analyses that ran during these runs, by name, in the order of
            their first runs.
    """

    name: str
    runs: int = 0
    total_s: float = 0.0
    grown_bytes: int = 0
    inside: dict[str, Timed] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """Seconds of all runs of the pass or analysis, without the time of the nodes in ``inside``."""
        return max(0.0, self.total_s - sum(s.total_s for s in self.inside.values()))

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Timed]]:
        """Yield this node of the timing tree and all nodes below this node, parents before children.

        Yields:
            Pairs of a node's depth in the tree and the node.
        """
        yield depth, self
        for span in self.inside.values():
            yield from span.walk(depth + 1)


class Timing(Instrument):
    """Instrument that measures the time and the memory growth of each pass.

    An analysis is computed when first requested, so the analysis appears in parentheses inside the
    requesting pass. One `Timing` adds up the measurements of all pipelines that the `Timing` observes.
    If a `Timing` is last in the list of instruments, the time of the other instruments counts for the
    pipeline and not for the passes.

    Attributes:
        root: root of the timing tree; the root is the node of the whole pipeline.
    """

    def __init__(self) -> None:
        self.root = Timed("pipeline")
        self._open: list[tuple[Timed, float, int]] = []
        self._watching = contextlib.ExitStack()

    def start(self, pipeline: Pipeline, state: State) -> None:
        self._watching.enter_context(watching(self._analysis))
        self._begin(self.root)

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        self._begin_inside(p.name)

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        self._end(len(path))

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        self._end(len(path))

    def finish(self, result: PassResult | None) -> None:
        self._watching.close()
        self._end(0)

    def __str__(self) -> str:
        """Return the timing tree as a text table.

        The columns of the table are: name; own seconds; total seconds; total seconds in percent of the
        whole; growth of resident memory in MiB; and number of runs.
        """
        rows = [("", "own s", "total s", "share", "memory MiB", "runs")]
        for depth, span in self.root.walk():
            share = span.total_s / self.root.total_s if self.root.total_s else 0.0
            rows.append(
                (
                    "  " * depth + span.name,
                    f"{span.own_s:.4f}",
                    f"{span.total_s:.4f}",
                    f"{share:.1%}",
                    f"{span.grown_bytes / 2**20:+.1f}",
                    str(span.runs),
                )
            )
        return ruled(rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the nodes of the timing tree as JSON-compatible dicts, parents before children."""
        return [
            {
                "name": span.name,
                "depth": depth,
                "runs": span.runs,
                "own_s": span.own_s,
                "total_s": span.total_s,
                "grown_bytes": span.grown_bytes,
            }
            for depth, span in self.root.walk()
        ]

    def _analysis(self, key: Analysis[Any], begins: bool) -> None:
        if begins:
            self._begin_inside(f"({key.name})")
        else:
            self._end(len(self._open) - 1)

    def _begin_inside(self, name: str) -> None:
        outer = self._open[-1][0].inside
        self._begin(outer.setdefault(name, Timed(name)))

    def _begin(self, span: Timed) -> None:
        self._open.append((span, time.perf_counter(), resident_bytes()))

    def _end(self, depth: int) -> None:
        """End the running measurements of passes and analyses that are at ``depth`` or deeper in the timing tree."""
        now, resident = time.perf_counter(), resident_bytes()
        # A failure may leave measurements open at deeper levels.
        while len(self._open) > depth:
            span, began, before = self._open.pop()
            span.runs += 1
            span.total_s += now - began
            span.grown_bytes += resident - before


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    # The second field counts resident pages.
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ruled(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as an aligned text table, with a line of dashes below the first row."""
    head, *lines = columns(rows)
    return "\n".join([head, "-" * max(map(len, [head, *lines])), *lines])
