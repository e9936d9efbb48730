"""Find the pass that makes the result of a pipeline bad, by a binary search over how many passes run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.errors import ProblemError
from remat.graph.joint import JointGraph
from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Instrument, Pipeline, Run
from remat.passes.core.state import PassResult, State


class OptBisect(Instrument):
    """Instrument that runs the first ``limit`` passes of a pipeline and skips the rest.

    Every run of a pass counts towards ``limit``, including runs inside a `Fixpoint`; a run of the
    `Fixpoint` itself does not count. A pass with ``optional=False`` always runs and does not count.

    Args:
        limit: number of counted passes to run; negative: run all.
        write: function that prints a line of ``lines``.

    Attributes:
        lines: one line per counted pass, such as ``BISECT: running pass (7) cse``.
        paths: for each counted pass, the names of the enclosing passes and of the pass.
    """

    only_inner: ClassVar[bool] = True

    def __init__(
        self, limit: int = -1, *, write: Callable[[str], None] = lambda line: None
    ) -> None:
        self.limit = limit
        self.lines: list[str] = []
        self.paths: list[tuple[str, ...]] = []
        self._write = write

    def around_pass(self, p: Pass, state: State, path: tuple[str, ...], run: Run) -> PassResult:
        if not p.optional:
            return run(state)
        self.paths.append(path)
        number = len(self.paths)
        runs = self.limit < 0 or number <= self.limit
        line = f"BISECT: {'running' if runs else 'NOT running'} pass ({number}) {' > '.join(path)}"
        self.lines.append(line)
        self._write(line)
        return run(state) if runs else PassResult(state=state, modified=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPass:
    """Result of a bisection: the first run of a pass after which the pipeline's result is bad.

    Attributes:
        number: number of the first bad run, counted from 1 as in `OptBisect`. If the pipeline stops
            before this run, the pipeline's result is good.
        path: names of the passes that enclose the bad pass, and last the name of the pass.
    """

    number: int
    path: tuple[str, ...]


def bisect(
    manager: Pipeline,
    joint: JointGraph,
    is_bad: Callable[[PassResult], bool],
    *,
    instruments: Sequence[Instrument] = (),
) -> BadPass | None:
    """Find the first run of a pass after which the result of a pipeline is bad, by binary search.

    A run of the pipeline that raises an exception counts as bad. The search assumes that a bad result
    stays bad if further passes run.

    Args:
        manager: the pipeline.
        joint: the graph to run the pipeline on; the graph is not changed.
        is_bad: function that returns whether a result of the pipeline is bad.
        instruments: further instruments for every run of the pipeline, such as a `VerifyEach` that
            raises.

    Returns:
        The first run of a pass after which the result is bad; None if the result of the whole pipeline
        is good.

    Raises:
        ProblemError: the result is bad even if only passes with ``optional=False`` run.
    """

    def fails(limited: OptBisect) -> bool:
        try:
            return is_bad(manager.run(joint, instruments=[limited, *instruments]))
        except Exception:  # any exception may be the symptom of the bad pass
            return True

    complete = OptBisect()
    if not fails(complete):
        return None
    # The search assumes a good result if only the passes with ``optional=False`` run.
    if fails(OptBisect(0)):
        needed = [p.name for p in manager.flat() if not p.optional]
        raise ProblemError(
            "the result is bad even where every pass is left out that can be; suspect "
            f"{', '.join(dict.fromkeys(needed)) or 'the graph itself'}"
        )
    limits = range(1, len(complete.paths))
    number = 1 + bisect_left(limits, True, key=lambda limit: fails(OptBisect(limit)))
    return BadPass(number=number, path=complete.paths[number - 1])
