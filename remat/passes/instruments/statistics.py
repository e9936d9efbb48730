"""Instrument that adds up the counts that passes report."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from remat.passes.core.pipeline import Instrument
from remat.passes.instruments.timing import ruled

if TYPE_CHECKING:
    from remat.passes.core.base import Pass
    from remat.passes.core.state import PassResult


class Statistics(Instrument):
    """Instrument that adds up the counts in `PassResult.statistics` over all runs of each pass.

    Attributes:
        counts: for each pass, the sums of its counts by name, such as ``removed``. The key of a pass is
            a tuple: the names of the enclosing passes, then the name of the pass.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], Counter[str]] = {}

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        if result.statistics:
            self.counts.setdefault(path, Counter()).update(result.statistics)

    def __str__(self) -> str:
        """Return the sums of counts as a text table, with one row for each sum that is not 0."""
        rows = [
            (" > ".join(path), name, str(n))
            for path, counts in self.counts.items()
            for name, n in counts.items()
            if n
        ]
        return ruled([("pass", "what", "count"), *rows]) if rows else "nothing was counted"
