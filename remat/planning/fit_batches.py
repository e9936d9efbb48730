"""The rows of a fit: one batch after another in this process, or several at a time by an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from remat.errors import ProblemError, unwarned
from remat.graph.joint import JointGraph
from remat.graph.text import parse_joint, print_joint
from remat.planning.batches import Batches
from remat.planning.fit import FitRow
from remat.planning.fit_fixed import Fixed
from remat.planning.fit_known import Known
from remat.planning.fit_row import Fitting
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.running.jobs import AnyExecutor, run_jobs

#: A captured step, and the bytes of its inputs and buffers.
Step = tuple[JointGraph, int]
#: Batches that an executor is given at a time while they are doubled, unless it is a number of processes.
_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of every batch.

    Attributes:
        fixed: what a step takes whatever the plan.
        memory_bytes: the memory of one rank.
        link_gbps: GB/s that a rank sends.
    """

    fixed: Fixed
    memory_bytes: int
    link_gbps: float


@dataclass(slots=True, kw_only=True)
class Rows:
    """Answers batches, and keeps what is known of those that are powers of two.

    Attributes:
        asked: what of each.
        request: solver, cost model and time limit.
        captured: captures the step of a batch.
        on_step: called with a line of text before each step.
    """

    asked: Asked
    request: PlanRequest
    captured: Callable[[int], Step]
    on_step: Callable[[str], None]
    _known: dict[int, Known | None] = field(default_factory=dict)

    def row(self, batch: int) -> FitRow:
        """What a batch comes to."""
        with unwarned():  # of plans that are only looked at
            fitting = self._fitting(batch, self.captured(batch))
            row = fitting.row(batch, lambda: self._of_power(batch))
        if batch == power(batch) and "known" in vars(fitting):
            self._known[batch] = fitting.known
        return row

    def _fitting(self, batch: int, step: Step) -> Fitting:
        def tell(text: str) -> None:
            self.on_step(f"batch {batch}: {text}")

        joint, other_bytes = step
        return Fitting(
            planner=Planner.of(joint, self.request, in_place=True, on_step=tell),
            fixed=self.asked.fixed,
            memory_bytes=self.asked.memory_bytes,
            other_bytes=other_bytes,
            link_gbps=self.asked.link_gbps,
        )

    def _of_power(self, batch: int) -> Known | None:
        """What is known of the next power of two: all batches up to it are asked for the same plans."""
        at = power(batch)
        if at == batch:
            return None
        if at not in self._known:
            try:
                self._known[at] = self._fitting(at, self.captured(at)).known
            except Exception:  # of any kind, from the user's code: nobody asked for that batch
                self._known[at] = None
        return self._known[at]


def power(batch: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (batch - 1).bit_length()


def rows_of(batches: Batches, rows: Rows, executor: AnyExecutor = None) -> dict[int, FitRow]:
    """The rows of all batches that are asked for.

    Args:
        batches: which; they are told what fits.
        rows: answers one.
        executor: what plans; None for this process. Steps are captured here in any case.

    Raises:
        ProblemError: the executor cannot be used, or a process of our own died.
    """
    found: dict[int, FitRow] = {}
    early: dict[int, FitRow] = {}
    width = executor if isinstance(executor, int) else _WIDTH
    for batch in batches:
        if executor is not None and batch not in early:
            early |= _elsewhere(batches.ahead(batch, width), rows, executor)
        found[batch] = early.pop(batch) if batch in early else rows.row(batch)
        batches.learn(batch, fits=found[batch].fits)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elsewhere:
    """One batch, to be planned by a worker: steps as text by batch, that of its power of two among them."""

    batch: int
    asked: Asked
    options: Mapping[str, str]
    steps: Mapping[int, tuple[str, int]]


def _elsewhere(batches: Sequence[int], rows: Rows, executor: AnyExecutor) -> dict[int, FitRow]:
    texts: dict[int, tuple[str, int]] = {}
    for batch in batches:
        for at in {batch, power(batch)} - texts.keys():
            try:
                joint, nbytes = rows.captured(at)
            except Exception:
                if at == batch:
                    raise
                continue  # nobody asked for that batch
            texts[at] = print_joint(joint), nbytes
    jobs = [
        _Elsewhere(
            batch=batch,
            asked=rows.asked,
            options=rows.request.to_text(),
            steps={at: texts[at] for at in (batch, power(batch)) if at in texts},
        )
        for batch in batches
    ]
    found: dict[int, FitRow] = {}

    def note(k: int, row: FitRow) -> None:
        found[batches[k]] = row

    def died(k: int, why: str) -> None:
        raise ProblemError(f"batch {batches[k]} was not planned: {why}; give fewer processes")

    rows.on_step(f"planning batches {', '.join(map(str, batches))}")
    run_jobs(_planned, jobs, executor, note, died)
    return found


def _planned(job: _Elsewhere) -> FitRow:
    def captured(batch: int) -> Step:
        text, nbytes = job.steps[batch]
        return parse_joint(text), nbytes

    rows = Rows(
        asked=job.asked,
        request=PlanRequest.from_text(job.options),
        captured=captured,
        on_step=lambda _: None,
    )
    return rows.row(job.batch)
