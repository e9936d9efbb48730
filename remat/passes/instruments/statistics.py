"""Instrument that adds up the counts that passes report."""

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
    """Instrument that adds up the counts in `PassResult.statistics` over all runs of each pass.

    The counts that a `Fixpoint` sums over its inner passes are only added to the inner passes.

    Attributes:
        counts: for each pass, the sum of each count by the count's name. The key is a tuple: the
            names of the enclosing passes, then the name of the pass.
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

    def __str__(self) -> str:
        """Return a text table with one row per count that is not 0."""
        rows = [
            (" > ".join(path), name, str(n))
            for path, counts in self.counts.items()
            for name, n in counts.items()
            if n
        ]
        return ruled([("pass", "what", "count"), *rows]) if rows else "nothing was counted"
