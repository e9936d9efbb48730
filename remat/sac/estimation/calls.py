"""Bytes that a module call in a training step allocates, and bytes that the call keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.sac.estimation.stats import SACStats
from remat.sac.run.lifetimes import Ints, Lifetimes
from remat.sac.run.recording import ModuleSpan


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


def call_stats(lifetimes: Lifetimes, span: ModuleSpan) -> CallStats:
    """Return the memory statistics of a module call; backward must read a tensor that was saved in the call."""
    allocated = lifetimes.allocated_in(span)
    # A returned storage stays alive in any case, so checkpointing does not free it.
    crosses = [
        k for k in allocated if k not in span.outputs and lifetimes.died[k] > span.back_begin
    ]
    # Checkpointing keeps the inputs for recomputation, even inputs that would be freed otherwise.
    freed_inputs = [
        k for k in span.inputs if lifetimes.born[k] >= 0 and lifetimes.died[k] <= span.back_begin
    ]
    back = lifetimes.total[span.back_begin : span.back_end + 1]
    died: dict[int, int] = {}
    for k in allocated:
        program_point = int(lifetimes.born[k])
        died[program_point] = max(died.get(program_point, 0), int(lifetimes.died[k]))
    ran = [call.program_point for call in lifetimes.operators(span)]
    return CallStats(
        begin=span.begin,
        end=span.end,
        back=span.back_begin,
        back_end=span.back_end,
        activation_bytes=int(lifetimes.nbytes[crosses].sum()),
        input_bytes=int(lifetimes.nbytes[freed_inputs].sum()),
        gradient_bytes=int(back.max() - back[0]),
        allocated=lifetimes.alive(allocated)[span.begin : span.end],
        # An operator that allocates nothing has no lifetime: it counts as freed one program point later.
        freed_at=tuple(
            (program_point, died.get(program_point, program_point + 1)) for program_point in ran
        ),
    )


def as_checkpointed(lifetimes: Lifetimes, span: ModuleSpan, stats: SACStats) -> SACStats:
    """Return the statistics of a module's operators, corrected for the case that the module is checkpointed.

    Bytes of returned results are added to ``memory`` if the step frees these results before the call's backward.
    Operators after the call's last saved tensor have a runtime of 0, because they do not run again.
    """
    freed_outputs = {
        int(lifetimes.born[k]): int(lifetimes.nbytes[k])
        for k in sorted(span.outputs)
        if span.begin <= lifetimes.born[k] and lifetimes.died[k] <= span.back_begin
    }
    ran = [call.program_point for call in lifetimes.operators(span)]
    return replace(
        stats,
        # Recomputation stops at the last saved tensor, so later operators do not run again.
        memory=[n + freed_outputs.get(t, 0) for n, t in zip(stats.memory, ran, strict=True)],
        runtimes=[
            ms if t < span.last_saved else 0.0 for ms, t in zip(stats.runtimes, ran, strict=True)
        ],
    )
