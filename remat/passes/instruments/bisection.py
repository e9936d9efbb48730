"""Which pass is to blame: run only the first so many, and search for the first bad one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.errors import ProblemError
from remat.passes.core.control import Composite
from remat.passes.core.pipeline import Instrument

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.core.base import Pass
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.core.state import PassResult, State


class OptBisect(Instrument):
    """Runs the first so many passes and leaves out the rest.

    Every run of a pass counts, those inside of other passes too; passes that are made of passes do
    not count themselves. A pass without which a pipeline would be wrong (`Pass.optional`) always
    runs and does not count.

    Args:
        limit: how many passes run; all where negative.
        write: what prints a line; None: the lines are only kept.

    Attributes:
        lines: what ran and what did not, a line each: ``BISECT: running pass (7) cse``.
        count: passes that ran or would have.
    """

    def __init__(self, limit: int = -1, *, write: Callable[[str], None] | None = None) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise ProblemError(f"limit is {limit!r}; expected how many passes run, -1 for all")
        self.limit = limit
        self.lines: list[str] = []
        self.paths: list[tuple[str, ...]] = []
        self._write = write

    @property
    def count(self) -> int:
        return len(self.paths)

    def should_run(self, p: Pass, state: State, path: tuple[str, ...]) -> bool:
        if isinstance(p, Composite) or not p.optional:
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
    """Result of a bisection.

    Attributes:
        number: which run of a pass it is, counted from 1: with a limit one lower all is well.
        path: the pass, with those that it is inside of before it.
        count: runs of passes in the whole pipeline.
        tried: how often the pipeline was run.
    """

    number: int
    path: tuple[str, ...]
    count: int
    tried: int

    @property
    def name(self) -> str:
        return self.path[-1]


def bisect(
    manager: Pipeline,
    joint: JointGraph,
    is_bad: Callable[[PassResult], bool],
    *,
    instruments: Sequence[Instrument] = (),
) -> BadPass | None:
    """Finds the first run of a pass after which the result of a pipeline is bad, by binary search.

    A pipeline that raises is bad. One bad pass is assumed to stay bad whatever runs after it.

    Args:
        manager: the pipeline.
        joint: the graph; it is not changed.
        is_bad: whether a result is bad.
        instruments: more that watches every trial, such as a `VerifyEach` that raises.

    Returns:
        The first bad pass; None where the whole pipeline is good.

    Raises:
        ProblemError: it is bad even where only those passes run that cannot be left out.
    """
    tried = 0

    def run(limit: int) -> tuple[bool, OptBisect]:
        nonlocal tried
        tried += 1
        limited = OptBisect(limit)
        try:
            result = manager.run(joint, instruments=[limited, *instruments])
        except Exception:  # whatever it is, the pass that is searched for may raise it
            return True, limited
        return bool(is_bad(result)), limited

    bad, whole = run(-1)
    if not bad:
        return None
    if run(0)[0]:
        needed = [p.name for p in manager.flat() if not p.optional]
        raise ProblemError(
            "the result is bad even where every pass is left out that can be; suspect "
            f"{', '.join(dict.fromkeys(needed)) or 'the graph itself'}"
        )
    good, bad_at = 0, whole.count
    seen = whole.paths
    while bad_at - good > 1:
        middle = (good + bad_at) // 2
        bad, limited = run(middle)
        if bad:  # one that raised may not have come as far as the limit
            bad_at, seen = max(good + 1, min(middle, limited.count)), limited.paths
        else:
            good = middle
    return BadPass(number=bad_at, path=seen[bad_at - 1], count=whole.count, tried=tried)
