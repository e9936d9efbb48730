"""Bytes that each module call of a step allocates, and bytes that the call keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.sac.estimation.stats import SACStats
from remat.sac.run.lifetimes import Ints, Lifetimes
from remat.sac.run.recording import ModuleSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallStats:
    """Memory of one module call in a step.

    A moment is a point in time of the step, such as the return of an operator; see `StepRecorder`.

    Attributes:
        begin: first moment of the call's forward.
        end: first moment after the call's forward.
        back: moment at which backward first reads a tensor saved in the call. At this moment, a
            checkpointed module would run again.
        back_end: moment at which backward last reads a tensor saved in the call.
        activation_bytes: bytes of the storages that the call allocates and does not return, and
            that are still alive at ``back``.
        input_bytes: bytes of the call's inputs that the step allocates and, without checkpointing,
            frees at or before ``back``. Checkpointing keeps these inputs for recomputation.
        gradient_bytes: most bytes alive in the step from ``back`` to ``back_end``, minus the bytes
            alive at ``back``. PyTorch's program reads it.
        made: array with an entry for each moment of the call's forward: bytes, alive at that moment,
            of the storages that the call allocates.
        freed_at: for each operator of the call, a pair: the moment at which the operator ran, and
            the moment at which its result is freed. An operator that allocates nothing counts as
            freed one moment after it ran.
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
        """Bytes that checkpointing frees from ``end`` until ``back`` if no results are stored."""
        return self.activation_bytes - self.input_bytes


def call_stats(lifetimes: Lifetimes, span: ModuleSpan) -> CallStats:
    """Return the bytes that one module call allocates, keeps and frees in a step.

    Args:
        step: lifetimes of the step's storages.
        span: the module call. Backward must read at least one tensor saved in the call.
    """
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
        moment = int(lifetimes.born[k])
        died[moment] = max(died.get(moment, 0), int(lifetimes.died[k]))
    ran = [call.moment for call in lifetimes.operators(span)]
    return CallStats(
        begin=span.begin,
        end=span.end,
        back=span.back_begin,
        back_end=span.back_end,
        activation_bytes=int(lifetimes.nbytes[crosses].sum()),
        input_bytes=int(lifetimes.nbytes[freed_inputs].sum()),
        gradient_bytes=int(back.max() - back[0]),
        allocated=lifetimes.alive(allocated)[span.begin : span.end],
        # An operator that allocates nothing has no lifetime: it counts as freed one moment later.
        freed_at=tuple((moment, died.get(moment, moment + 1)) for moment in ran),
    )


def as_checkpointed(lifetimes: Lifetimes, span: ModuleSpan, stats: SACStats) -> SACStats:
    """Return the statistics of a module's operators for the case that the module is checkpointed.

    Two fields change. First, ``memory`` includes the bytes of a result that the module returns, if
    the step frees the result before the call's backward. Second, operators after the call's last
    saved tensor get runtime 0, because recomputation stops at that tensor.

    Args:
        step: lifetimes of the step's storages.
        span: the module call.
        stats: statistics of the call's operators without checkpointing.
    """
    freed_outputs = {
        int(lifetimes.born[k]): int(lifetimes.nbytes[k])
        for k in sorted(span.outputs)
        if span.begin <= lifetimes.born[k] and lifetimes.died[k] <= span.back_begin
    }
    ran = [call.moment for call in lifetimes.operators(span)]
    return replace(
        stats,
        memory=[n + freed_outputs.get(t, 0) for n, t in zip(stats.memory, ran, strict=True)],
        runtimes=[
            ms if t < span.last_saved else 0.0 for ms, t in zip(stats.runtimes, ran, strict=True)
        ],
    )
