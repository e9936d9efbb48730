"""Instrument that sums the statistics of passes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from remat.passes.core.control import Fixpoint
from remat.passes.core.pipeline import Instrument
from remat.passes.instruments.timing import ruled

if TYPE_CHECKING:
    from remat.passes.core.base import Pass
    from remat.passes.core.state import PassResult, State


class Statistics(Instrument):
    """Instrument that sums the statistics that passes report, by the path of the pass.

    Counts that a `Fixpoint` summed over its inner passes are not counted again.

    Attributes:
        counts: for each path of a pass (enclosing passes first), the sums by name.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], Counter[str]] = {}
        self._inside: list[Counter[str]] = []

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        self._inside.append(Counter())

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        own, inside = Counter(result.statistics), self._inside.pop()
        if self._inside:
            self._inside[-1].update(own)
        if isinstance(p, Fixpoint):
            own -= inside  # drops counts that are not positive
        if own:
            self.counts.setdefault(path, Counter()).update(own)

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        del self._inside[len(path) - 1 :]

    def table(self) -> str:
        """Return a text table with one row per count that is not 0."""
        rows = [
            (" > ".join(path), name, str(n))
            for path, counts in self.counts.items()
            for name, n in counts.items()
            if n
        ]
        return ruled([("pass", "what", "count"), *rows]) if rows else "nothing was counted"

    def __str__(self) -> str:
        return self.table()
