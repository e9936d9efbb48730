"""Lifetimes of the storages in one training step, and the bytes that each module call allocates and keeps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import nn

from remat.sac.estimation.stats import SACStats
from remat.sac.run.recording import ModuleSpan, StepRecorder

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallStats:
    """Memory of one module call in a step; program points are those of `StepRecorder`.

    Attributes:
        begin: first program point of the call's forward.
        end: first program point after the call's forward.
        back: program point at which backward first reads a tensor saved in the call. At this program point, a
            checkpointed module would run again.
        back_end: program point at which backward last reads a tensor saved in the call.
        activation_bytes: bytes of the storages that the call allocates and does not return, and that
            are still alive at ``back``.
        input_bytes: bytes of the call's inputs that the step allocates and, without checkpointing,
            frees at or before ``back``.
        gradient_bytes: most bytes alive in the step from ``back`` to ``back_end``, minus the bytes alive
            at ``back``. PyTorch's integer program uses this number.
        allocated: for each program point of the call's forward, the bytes of the storages that the call has
            allocated and that are alive.
        freed_at: (program point of the run, program point at which the result is freed) of each operator of the call.
    """

    begin: int
    end: int
    back: int
    back_end: int
    activation_bytes: int
    input_bytes: int
    gradient_bytes: int
    allocated: Ints
    freed_at: tuple[tuple[int, int], ...]

    @property
    def freeable_bytes(self) -> int:
        """Bytes that checkpointing frees between the call's forward and backward if no results are stored."""
        return self.activation_bytes - self.input_bytes


class Lifetimes:
    """Sizes and lifetimes of the storages of one recorded training step.

    Build a `Lifetimes` object directly after the step, while the model's parameters hold the step's gradients. Program
    points are those of `StepRecorder`, and so are the numbers of storages, by which the arrays are indexed.

    Attributes:
        recorder: recorder of the step.
        born: program point at which each storage is allocated; below 0 if it existed before the step.
        died: program point at which each storage is freed; the number of program points if it is alive at the end of
            the step.
        nbytes: bytes of each storage.
        resident: storages of the parameters.
        gradients: storages of the parameters' gradients.
        forward_end: first program point of backward.
    """

    def __init__(self, recorder: StepRecorder, model: nn.Module, forward_end: int) -> None:
        parameters = list(model.parameters())
        died = np.array(recorder.died, dtype=np.int64)
        self.recorder = recorder
        # The lists are copied, because storages that are freed after the step still change the recorder's lists.
        self.born = np.array(recorder.born, dtype=np.int64)
        self.died: Ints = np.where(died < 0, recorder.now, died)
        self.nbytes = np.array(recorder.nbytes, dtype=np.int64)
        self.resident = recorder.numbers_of(parameters)
        self.gradients = recorder.numbers_of(p.grad for p in parameters if p.grad is not None)
        self.forward_end = forward_end

    def alive(self, numbers: Iterable[int]) -> Ints:
        """Return the bytes alive at each program point, summed over the storages with the given numbers."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        change = np.zeros(self.recorder.now + 1, dtype=np.int64)
        # change[...] += … would count a program point that occurs several times only once. The maximum with 0 is
        # taken, because storages from before the step have a negative program point of allocation.
        np.add.at(change, np.maximum(self.born[chosen], 0), self.nbytes[chosen])
        np.subtract.at(change, self.died[chosen], self.nbytes[chosen])
        return np.cumsum(change)[:-1]

    @functools.cached_property
    def total(self) -> Ints:
        """Bytes of all storages that are alive at each program point."""
        return self.alive(range(len(self.born)))

    def call_stats(self, span: ModuleSpan) -> CallStats:
        """Return the memory statistics of a module call; backward must read a tensor that was saved in the call."""
        allocated = np.flatnonzero((self.born >= span.begin) & (self.born < span.end))
        # A returned storage stays alive in any case, so checkpointing does not free it.
        crosses = [k for k in allocated if k not in span.outputs and self.died[k] > span.back_begin]
        # Checkpointing keeps the inputs for recomputation, even inputs that would be freed otherwise.
        freed_inputs = [
            k for k in span.inputs if self.born[k] >= 0 and self.died[k] <= span.back_begin
        ]
        back = self.total[span.back_begin : span.back_end + 1]
        died: dict[int, int] = {}
        for k in allocated:
            program_point = int(self.born[k])
            died[program_point] = max(died.get(program_point, 0), int(self.died[k]))
        return CallStats(
            begin=span.begin,
            end=span.end,
            back=span.back_begin,
            back_end=span.back_end,
            activation_bytes=int(self.nbytes[crosses].sum()),
            input_bytes=int(self.nbytes[freed_inputs].sum()),
            gradient_bytes=int(back.max() - back[0]),
            allocated=self.alive(allocated)[span.begin : span.end],
            # An operator that allocates nothing has no lifetime: it counts as freed one program point later.
            freed_at=tuple((t, died.get(t, t + 1)) for t in self._ran(span)),
        )

    def as_checkpointed(self, span: ModuleSpan, stats: SACStats) -> SACStats:
        """Return the statistics of a module's operators, corrected for the case that the module is checkpointed.

        Bytes of returned results are added to ``memory`` if the step frees these results before the call's backward.
        Operators after the call's last saved tensor have a runtime of 0, because they do not run again.
        """
        freed_outputs = {
            int(self.born[k]): int(self.nbytes[k])
            for k in sorted(span.outputs)
            if span.begin <= self.born[k] and self.died[k] <= span.back_begin
        }
        ran = self._ran(span)
        return replace(
            stats,
            memory=[n + freed_outputs.get(t, 0) for n, t in zip(stats.memory, ran, strict=True)],
            # Recomputation stops at the last saved tensor, so later operators do not run again.
            runtimes=[
                ms if t < span.last_saved else 0.0
                for ms, t in zip(stats.runtimes, ran, strict=True)
            ],
        )

    def _ran(self, span: ModuleSpan) -> list[int]:
        """Return the program points of a module call's operators, except operators that checkpointing ignores."""
        calls = self.recorder.calls[span.first : span.last]
        return [call.program_point for call in calls if not call.skipped]
