"""Schedules of the step problem in which values are offloaded to the host between forward and backward.

``evaluate_offloads`` is the one yardstick: it follows the runs and the copies, in integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from remat.errors import ProblemError
from remat.solvers.schedule_problem import (
    ScheduleEvaluation,
    ScheduleProblem,
    evaluate_schedule,
)
from remat.solvers.transfers import Placement, Transfer, place


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadProblem:
    """A step problem whose values may also be offloaded.

    Attributes:
        step: the step problem; its costs are times, its capacity bounds the device's memory.
        times: time of one run of each node, backward's own included.
        send: for each node, time of its copy to the host; -1: it must not be offloaded.
        fetch: for each node, time of the copy back; likewise.
    """

    step: ScheduleProblem
    times: tuple[int, ...]
    send: tuple[int, ...]
    fetch: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedSchedule:
    """A schedule with the values that it carries over the boundary, for many evaluations of offloads.

    Attributes:
        sequence: its runs.
        evaluation: its memory and cost without offloads.
        idle: for each value that is carried over the boundary, its last use before and its first after.
    """

    sequence: tuple[int, ...]
    evaluation: ScheduleEvaluation
    idle: dict[int, tuple[int, int]]

    @property
    def boundary(self) -> int:
        """Position of the first run after the boundary."""
        return self.evaluation.boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadEvaluation:
    """Memory and cost of a schedule with offloads.

    Attributes:
        cost: recomputation and exposed transfer time together.
        peak_bytes: most bytes alive on the device.
        offloaded: the values that are offloaded, in the order of ``placement``.
        placement: where copies stand, by positions of the schedule.
    """

    cost: int
    peak_bytes: int
    offloaded: tuple[int, ...]
    placement: Placement


def carried(
    problem: OffloadProblem, sequence: Sequence[int], boundary: int | None = None
) -> CarriedSchedule:
    """Finds what a schedule carries over its boundary.

    Raises:
        ProblemError: it cannot run.
    """
    step = problem.step
    evaluation = evaluate_schedule(step, sequence, boundary)
    made, stays = step.results, step.given.union(step.to_end)
    ready: dict[int, int] = {}
    needed: dict[int, int] = {}
    for at, v in enumerate(sequence):
        if at < evaluation.boundary:
            for u in (*step.inputs[v], *made[v]):
                ready[u] = at
            continue
        for u in step.inputs[v]:
            if u in ready and u not in needed:
                needed[u] = at
        for u in made[v]:
            if u not in needed:
                ready.pop(u, None)  # its later run is what backward reads
    idle = {
        i: (ready[i], needed[i])
        for i in sorted(needed)
        if i not in stays and i in ready and step.size[i]
    }
    return CarriedSchedule(sequence=tuple(sequence), evaluation=evaluation, idle=idle)


def evaluate_offloads(
    problem: OffloadProblem,
    schedule: CarriedSchedule,
    offloaded: Iterable[int],
    capacity: int | None,
) -> OffloadEvaluation:
    """Follows copies through a schedule.

    Args:
        problem: the problem.
        schedule: the schedule.
        offloaded: the nodes whose values are offloaded; those that are not carried over the boundary stay.
        capacity: bytes within which copies are placed; None: any number.

    Raises:
        ProblemError: a value must not be offloaded.
    """
    step, evaluation, idle = problem.step, schedule.evaluation, schedule.idle
    used = tuple(sorted({v for v in offloaded if v in idle}))
    change = [0] * (len(evaluation.bytes_alive) + 1)
    transfers = []
    for v in used:
        if problem.send[v] < 0:
            raise ProblemError(f"'{step.names[v]}' is offloaded, and must not be")
        first, last = idle[v]
        change[first + 1] -= step.size[v]
        change[last] += step.size[v]
        transfers.append(
            Transfer(
                nbytes=step.size[v],
                ready=first,
                needed=last,
                send=problem.send[v],
                fetch=problem.fetch[v],
            )
        )
    alive = [a + c for a, c in zip(evaluation.bytes_alive, accumulate(change), strict=False)]
    times = [problem.times[v] for v in schedule.sequence]
    placed = place(times, schedule.boundary, alive, transfers, capacity)
    return OffloadEvaluation(
        cost=evaluation.cost - sum(step.cost) + placed.exposed_time,
        peak_bytes=max(placed.bytes_alive, default=evaluation.peak_bytes),
        offloaded=used,
        placement=placed,
    )
