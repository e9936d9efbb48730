"""What passes counted, summed up over a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from remat.passes.core.control import Composite
from remat.passes.core.pipeline import Instrument
from remat.passes.instruments.timing import columns

if TYPE_CHECKING:
    from remat.passes.core.base import Pass
    from remat.passes.core.state import PassResult, State


class Statistics(Instrument):
    """Sums up the statistics that passes report, by the place of the pass in the pipeline.

    What a pass made of passes hands on from those inside of it counts there, not twice.

    Attributes:
        counts: for each path, outermost pass first, the counts by name.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], dict[str, int]] = {}
        self._inside: list[dict[str, int]] = []

    def before(self, p: Pass, state: State, path: tuple[str, ...]) -> None:
        self._inside.append({})

    def after(self, p: Pass, result: PassResult, path: tuple[str, ...]) -> None:
        inside = self._inside.pop()
        if self._inside:
            _add(self._inside[-1], result.statistics)
        own = dict(result.statistics)
        if isinstance(p, Composite):
            left = {name: n - inside.get(name, 0) for name, n in own.items()}
            own = {name: n for name, n in left.items() if n > 0}
        if own:
            _add(self.counts.setdefault(path, {}), own)

    def failed(self, p: Pass, state: State, path: tuple[str, ...], error: BaseException) -> None:
        del self._inside[len(path) - 1 :]

    def total(self) -> dict[str, int]:
        """The counts of all passes, by name."""
        found: dict[str, int] = {}
        for counts in self.counts.values():
            _add(found, counts)
        return found

    def table(self) -> str:
        """One line for each count that is not 0."""
        rows = [("count", "pass", "what")]
        rows += [
            (str(n), " > ".join(path), name)
            for path, counts in self.counts.items()
            for name, n in counts.items()
            if n
        ]
        if len(rows) == 1:
            return "nothing was counted"
        return columns([(path, name, n) for n, path, name in rows])

    def __str__(self) -> str:
        return self.table()


def _add(into: dict[str, int], counts: Mapping[str, int]) -> None:
    for name, n in counts.items():
        into[name] = into.get(name, 0) + n
