"""Find the pass that makes the result of a pipeline bad, by a binary search over how many passes run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from remat.errors import ProblemError
from remat.passes.core.pipeline import Instrument

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.core.state import PassResult, State


class OptBisect(Instrument):
    """Instrument that runs the first ``limit`` passes of a pipeline and skips the rest.

    Every run of a pass counts towards ``limit``, including runs inside a `Fixpoint`; a run of the
    `Fixpoint` itself does not count. A pass with ``optional=False`` always runs and does not count.

    Args:
        limit: number of counted passes to run; negative: run all.
        write: function that prints a line of ``lines``; None: the lines are not printed.

    Raises:
        ProblemError: ``limit`` is not an int.

    Attributes:
        lines: one line per counted pass, such as ``BISECT: running pass (7) cse``.
        paths: for each counted pass, the names of the enclosing passes and of the pass.
        count: number of passes that have counted towards ``limit`` so far, both run and skipped.
    """

    only_inner: ClassVar[bool] = True

    def __init__(self, limit: int = -1, *, write: Callable[[str], None] | None = None) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise ProblemError(f"limit is {limit!r}; expected how many passes run, -1 for all")
        self.limit = limit
        self.lines: list[str] = []
        self.paths: list[tuple[str, ...]] = []
        self._write = write

    @property
    def count(self) -> int:
        """Number of passes that have counted towards ``limit`` so far, both run and skipped."""
        return len(self.paths)

    def should_run(self, p: Pass, state: State, path: tuple[str, ...]) -> bool:
        if not p.optional:
            return True
        self.paths.append(path)
        runs = self.limit < 0 or self.count <= self.limit
        line = (
            f"BISECT: {'running' if runs else 'NOT running'} pass ({self.count}) {' > '.join(path)}"
        )
        self.lines.append(line)
        if self._write is not None:
            self._write(line)
        return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPass:
    """Result of a bisection: the first run of a pass after which the pipeline's result is bad.

    Attributes:
        number: number of the first bad run, counted from 1 as in `OptBisect`. If the pipeline stops
            before this run, the pipeline's result is good.
        path: names of the passes that enclose the bad pass, and last the name of the pass.
        count: number of counted runs in the whole pipeline.
        pipeline_runs: number of times that the search ran the pipeline.
    """

    number: int
    path: tuple[str, ...]
    count: int
    pipeline_runs: int

    @property
    def name(self) -> str:
        """Name of the pass after whose run the pipeline's result is bad."""
        return self.path[-1]


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
    pipeline_runs = 0

    def run(limit: int) -> tuple[bool, OptBisect]:
        nonlocal pipeline_runs
        pipeline_runs += 1
        limited = OptBisect(limit)
        try:
            result = manager.run(joint, instruments=[limited, *instruments])
        except Exception:  # any exception may be the symptom of the bad pass
            return True, limited
        return bool(is_bad(result)), limited

    bad, complete = run(-1)
    if not bad:
        return None
    # The search assumes a good result if only the passes with ``optional=False`` run.
    if run(0)[0]:
        needed = [p.name for p in manager.flat() if not p.optional]
        raise ProblemError(
            "the result is bad even where every pass is left out that can be; suspect "
            f"{', '.join(dict.fromkeys(needed)) or 'the graph itself'}"
        )
    good, bad_at = 0, complete.count
    seen = complete.paths
    while bad_at - good > 1:
        middle = (good + bad_at) // 2
        bad, limited = run(middle)
        if bad:  # a run that raised may have counted fewer passes than the limit
            bad_at, seen = max(good + 1, min(middle, limited.count)), limited.paths
        else:
            good = middle
    return BadPass(
        number=bad_at, path=seen[bad_at - 1], count=complete.count, pipeline_runs=pipeline_runs
    )
