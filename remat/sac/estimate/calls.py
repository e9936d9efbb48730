"""The calls of modules in a step: the memory that each makes and keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from remat.sac.estimate.stats import SACStats
from remat.sac.run.lifetimes import Lifetimes, Span

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallStats:
    """One call of a module in the step. Moments are those of `Lifetimes`.

    Attributes:
        begin: first moment of its forward.
        end: first moment after it.
        back: when backward first asks for something that was saved in it: when it would run again.
        activation_bytes: memory that it makes, does not return, and backward reads.
        input_bytes: inputs that nothing keeps until ``back``, unless the module is checkpointed.
        gradient_bytes: by how much memory rises at most from ``back`` to the end of its backward.
        made: bytes alive of all that it made, by moment of its forward.
        freed_at: moment at which each of its operators' memory is made, and at which it is freed;
            None where they cannot be told apart.
    """

    begin: int
    end: int
    back: int
    activation_bytes: int
    input_bytes: int
    gradient_bytes: int
    made: Bytes
    freed_at: tuple[tuple[int, int], ...] | None

    @property
    def freeable_bytes(self) -> int:
        """What checkpointing frees until ``back`` if it stores nothing."""
        return self.activation_bytes - self.input_bytes


class LifeTable:
    """The lives of memories as arrays, for sums over them."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._of = lifetimes
        self._born = np.array(lifetimes.born, dtype=np.int64)
        self._died = np.array(lifetimes.died, dtype=np.int64)
        self._nbytes = np.array(lifetimes.nbytes, dtype=np.int64)
        self._total = self.alive(range(len(self._born)))

    def alive(self, memories: Any) -> Bytes:
        """Bytes alive of some memories, by moment."""
        chosen = np.fromiter(memories, dtype=np.int64)
        change = np.zeros(self._of.moments + 1, dtype=np.int64)
        np.add.at(change, np.maximum(self._born[chosen], 0), self._nbytes[chosen])
        np.subtract.at(change, self._died[chosen], self._nbytes[chosen])
        return np.cumsum(change)[:-1]

    def other(self) -> Bytes:
        """Bytes alive by moment of all but parameters and their gradients."""
        left = self._of.resident | self._of.gradients
        return self.alive([k for k in range(len(self._born)) if k not in left])

    def call(self, span: Span, stats: SACStats | None) -> CallStats:
        made = self._made(span)
        inner = made.copy()
        inner[list(span.outputs)] = False
        crosses = inner & (self._died > span.back_begin)
        lost = [k for k in span.inputs if self._born[k] >= 0 and self._died[k] <= span.back_begin]
        back = self._total[span.back_begin : span.back_end + 1]
        return CallStats(
            begin=span.begin,
            end=span.end,
            back=span.back_begin,
            activation_bytes=int(self._nbytes[crosses].sum()),
            input_bytes=int(self._nbytes[lost].sum()),
            gradient_bytes=int(back.max() - back[0]),
            made=self.alive(np.flatnonzero(made))[span.begin : span.end],
            freed_at=None if stats is None else self._lives(span, stats, made),
        )

    def as_checkpointed(self, span: Span, stats: SACStats) -> SACStats:
        """What a checkpointed call keeps and runs again, by operator."""
        lives = self._lives(span, stats, self._made(span))
        if lives is None:
            return stats
        lost = {
            int(self._born[k]): int(self._nbytes[k])
            for k in sorted(span.outputs)
            if span.begin <= self._born[k] and self._died[k] <= span.back_begin
        }
        moments = [moment for moment, _ in lives]
        return replace(
            stats,
            memory=[n + lost.get(t, 0) for n, t in zip(stats.memory, moments, strict=True)],
            runtimes=[
                ms if t < span.last_saved else 0.0
                for ms, t in zip(stats.runtimes, moments, strict=True)
            ],
        )

    def _made(self, span: Span) -> npt.NDArray[np.bool_]:
        return (self._born >= span.begin) & (self._born < span.end)

    def _lives(
        self, span: Span, stats: SACStats, made: npt.NDArray[np.bool_]
    ) -> tuple[tuple[int, int], ...] | None:
        """When the memory of each operator in the statistics is made and when freed."""
        died = dict.fromkeys(range(span.begin, span.end), -1)
        for k in np.flatnonzero(made).tolist():
            died[int(self._born[k])] = max(died[int(self._born[k])], int(self._died[k]))
        found = []
        ops = iter(span.ops)
        for name in stats.func_names:  # replayed views ran here and are not in the statistics
            moment = next((t for t, op in ops if op == name), None)
            if moment is None:
                return None
            found.append((moment, died[moment] if died[moment] >= 0 else moment + 1))
        return tuple(found)
