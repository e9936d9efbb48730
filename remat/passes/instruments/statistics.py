"""Instrument that adds up the counts that passes report."""

from __future__ import annotations

from collections import Counter

from remat.passes.core.base import Pass
from remat.passes.core.pipeline import Instrument, Run
from remat.passes.core.state import PassResult, State
from remat.passes.instruments.timing import ruled


class Statistics(Instrument):
    """Instrument that adds up the counts in `PassResult.statistics` over all runs of each pass.

    Attributes:
        counts: for each pass, the sums of its counts by name, such as ``removed``. The key of a pass is
            a tuple: the names of the enclosing passes, then the name of the pass.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], Counter[str]] = {}

    def around_pass(self, p: Pass, state: State, path: tuple[str, ...], run: Run) -> PassResult:
        result = run(state)
        if result.statistics:
            self.counts.setdefault(path, Counter()).update(result.statistics)
        return result

    def __str__(self) -> str:
        """Return the sums of counts as a text table, with one row for each sum that is not 0."""
        rows = [
            (" > ".join(path), name, str(n))
            for path, counts in self.counts.items()
            for name, n in counts.items()
            if n
        ]
        return ruled([("pass", "what", "count"), *rows]) if rows else "nothing was counted"
