"""The calls of modules in a step: the memory that each makes and keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.sac.estimation.stats import SACStats
from remat.sac.run.lifetimes import Ints, Lifetimes
from remat.sac.run.recording import ModuleSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallStats:
    """One call of a module in the step. Moments are those of `Lifetimes`.

    Attributes:
        begin: first moment of its forward.
        end: first moment after it.
        back: when backward first asks for something that was saved in it: when it would run again.
        back_end: when backward last does.
        activation_bytes: memory that it makes, does not return, and backward reads.
        input_bytes: inputs that nothing keeps until ``back``, unless the module is checkpointed.
        gradient_bytes: by how much memory rises at most from ``back`` to the end of its backward.
        made: bytes alive of all that it made, by moment of its forward.
        freed_at: moment at which each of its operators' memory is made, and at which it is freed.
    """

    begin: int
    end: int
    back: int
    back_end: int
    activation_bytes: int
    input_bytes: int
    gradient_bytes: int
    made: Ints
    freed_at: tuple[tuple[int, int], ...]

    @property
    def freeable_bytes(self) -> int:
        """What checkpointing frees until ``back`` if it stores nothing."""
        return self.activation_bytes - self.input_bytes


def call_stats(step: Lifetimes, span: ModuleSpan) -> CallStats:
    """What a step shows of a call of a module that has a backward."""
    made = step.made(span)
    crosses = [k for k in made if k not in span.outputs and step.died[k] > span.back_begin]
    lost = [k for k in span.inputs if step.born[k] >= 0 and step.died[k] <= span.back_begin]
    back = step.total[span.back_begin : span.back_end + 1]
    died: dict[int, int] = {}
    for k in made:
        moment = int(step.born[k])
        died[moment] = max(died.get(moment, 0), int(step.died[k]))
    ran = [call.moment for call in step.operators(span)]
    return CallStats(
        begin=span.begin,
        end=span.end,
        back=span.back_begin,
        back_end=span.back_end,
        activation_bytes=int(step.nbytes[crosses].sum()),
        input_bytes=int(step.nbytes[lost].sum()),
        gradient_bytes=int(back.max() - back[0]),
        made=step.alive(made)[span.begin : span.end],
        freed_at=tuple((moment, died.get(moment, moment + 1)) for moment in ran),
    )


def as_checkpointed(step: Lifetimes, span: ModuleSpan, stats: SACStats) -> SACStats:
    """What a checkpointed call keeps and runs again, by operator."""
    lost = {
        int(step.born[k]): int(step.nbytes[k])
        for k in sorted(span.outputs)
        if span.begin <= step.born[k] and step.died[k] <= span.back_begin
    }
    ran = [call.moment for call in step.operators(span)]
    return replace(
        stats,
        memory=[n + lost.get(t, 0) for n, t in zip(stats.memory, ran, strict=True)],
        runtimes=[
            ms if t < span.last_saved else 0.0 for ms, t in zip(stats.runtimes, ran, strict=True)
        ],
    )
