"""Instrument that measures time and memory growth of a pipeline, as a tree of passes and analyses."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Instrument, Pipeline, Run
from remat.passes.core.state import PassResult, State, around_analyses
from remat.units import columns

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
        #: The nodes whose runs are being measured, outermost first.
        self._open: list[Timed] = []

    def around_pipeline(self, pipeline: Pipeline, state: State, run: Run) -> PassResult:
        with around_analyses(lambda key: self._measured(f"({key.name})")), self._measured():
            return run(state)

    def around_pass(self, p: Pass, state: State, path: tuple[str, ...], run: Run) -> PassResult:
        with self._measured(p.name):
            return run(state)

    @contextlib.contextmanager
    def _measured(self, name: str = "") -> Iterator[None]:
        """Add the ``with`` block's time and memory growth to the node ``name`` below the innermost open node."""
        span = self.root
        if self._open:
            span = self._open[-1].inside.setdefault(name, Timed(name))
        self._open.append(span)
        began, before = time.perf_counter(), resident_bytes()
        try:
            yield
        finally:
            self._open.pop()
            span.runs += 1
            span.total_s += time.perf_counter() - began
            span.grown_bytes += resident_bytes() - before

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
        head, *lines = columns(rows)
        return "\n".join([head, "-" * max(map(len, [head, *lines])), *lines])

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


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    # The second field counts resident pages.
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
