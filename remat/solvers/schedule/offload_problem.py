"""Define schedule problems whose values may be offloaded to the host between forward and backward.

`evaluate_offloads` defines the memory and cost of a schedule with offloads, in integers, by following
its runs and copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from remat.errors import ProblemError
from remat.solvers.schedule.problem import (
    ScheduleEvaluation,
    ScheduleProblem,
    evaluate_schedule,
)
from remat.solvers.schedule.transfers import Placement, Transfer, place


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadProblem:
    """A schedule problem whose values may also be offloaded to the host's memory.

    Attributes:
        schedule_problem: the schedule problem; its costs are times, and its capacity limits the device's memory.
        times: time of one run of each node, also of backward nodes, in the unit of the costs.
        copy_time: for each node, the time of the copy of its value to the host, which is also the
            time of the copy back; -1 if the value must not be offloaded.
        host_size: for each node, the bytes that a copy of its value takes in the host's memory.
        host_capacity: bytes that may lie in the host's memory at one time; None: no limit.
        always: nodes whose values are offloaded in every decision, if backward reads the values
            that forward made.
    """

    schedule_problem: ScheduleProblem
    times: tuple[int, ...]
    copy_time: tuple[int, ...]
    host_size: tuple[int, ...]
    host_capacity: int | None = None
    always: tuple[int, ...] = ()

    def host_over(self, host_bytes: int) -> int:
        """Return by how many bytes ``host_bytes`` exceed the host's capacity; 0 if they fit."""
        return 0 if self.host_capacity is None else max(0, host_bytes - self.host_capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedSchedule:
    """A schedule with the values that it carries from forward to backward.

    Attributes:
        sequence: the nodes in the order in which they run.
        evaluation: memory and cost of the schedule without offloads.
        idle: for each value that forward makes and backward reads, by node: the positions in
            ``sequence`` of its last use in forward and of its first use in backward.
    """

    sequence: tuple[int, ...]
    evaluation: ScheduleEvaluation
    idle: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """A decision which values to save and which to offload, with its schedule, memory and cost.

    Attributes:
        saved: positions of the saved nodes in the graph problem.
        schedule: the schedule of the decision, without copies.
        offloaded: nodes of the schedule problem whose values are offloaded, in the order of the transfers in
            ``placement``.
        cost: recompute cost plus exposed transfer time, the time for which runs wait for copies.
        peak_bytes: most bytes alive on the device at one time.
        host_bytes: bytes of all offloaded values, which are in the host's memory at one time.
        over: bytes above the capacities of the device and of the host, summed over all positions of the
            schedule; 0 if the decision fits.
        placement: the copies' positions in the schedule, with the memory and the waits.
    """

    saved: tuple[int, ...]
    schedule: CarriedSchedule
    offloaded: tuple[int, ...]
    cost: int
    peak_bytes: int
    host_bytes: int
    over: int
    placement: Placement

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key ``(over, cost)``: the best plan has the fewest bytes above the capacities, then the least cost."""
        return self.over, self.cost


def carried(
    problem: OffloadProblem,
    sequence: Sequence[int],
    boundary: int | None = None,
) -> CarriedSchedule:
    """Evaluate a schedule without offloads, and find the values that forward makes and backward reads.

    If ``boundary`` is None, backward begins as late as possible.
    """
    schedule_problem = problem.schedule_problem
    evaluation = evaluate_schedule(schedule_problem, sequence, boundary)
    results, stays = schedule_problem.results, schedule_problem.given.union(schedule_problem.to_end)
    ready: dict[int, int] = {}
    needed: dict[int, int] = {}
    for at, v in enumerate(sequence):
        if at < evaluation.boundary:
            for u in (*schedule_problem.inputs[v], *results[v]):
                ready[u] = at
            continue
        for u in schedule_problem.inputs[v]:
            if u in ready and u not in needed:
                needed[u] = at
        for u in results[v]:
            if u not in needed:
                # Backward recomputes the value before reading it, so forward's value is not carried over.
                ready.pop(u, None)
    idle = {
        i: (ready[i], needed[i])
        for i in sorted(needed)
        if i not in stays and i in ready and schedule_problem.size[i]
    }
    return CarriedSchedule(sequence=tuple(sequence), evaluation=evaluation, idle=idle)


def evaluate_offloads(
    problem: OffloadProblem,
    schedule: CarriedSchedule,
    offloaded: Iterable[int],
    capacity: int | None,
    saved: tuple[int, ...] = (),
) -> OffloadPlan:
    """Compute the memory and cost of a schedule with offloads.

    Args:
        problem: the schedule problem with its copy times.
        schedule: the schedule, with the values that it carries into backward.
        offloaded: nodes whose values are offloaded, in addition to those of ``problem.always``.
            Values that are not carried into backward stay on the device.
        capacity: bytes that may be alive on the device. Runs wait for copies so that the peak stays
            within the capacity. The peak exceeds the capacity only if waiting does not suffice.
            None: no limit.
        saved: positions of the saved nodes in the graph problem, for the result.
    """
    schedule_problem, evaluation, idle = (
        problem.schedule_problem,
        schedule.evaluation,
        schedule.idle,
    )
    used = tuple(sorted({v for v in (*offloaded, *problem.always) if v in idle}))
    change = [0] * (len(evaluation.bytes_alive) + 1)
    transfers = []
    for v in used:
        if problem.copy_time[v] < 0:
            raise ProblemError(f"'{schedule_problem.names[v]}' is offloaded, and must not be")
        first, last = idle[v]
        # The bytes are gone between the two uses. `place` adds them again while the copies run.
        change[first + 1] -= schedule_problem.size[v]
        change[last] += schedule_problem.size[v]
        transfers.append(
            Transfer(
                nbytes=schedule_problem.size[v],
                ready=first,
                needed=last,
                copy_time=problem.copy_time[v],
            )
        )
    alive = [a + c for a, c in zip(evaluation.bytes_alive, accumulate(change), strict=False)]
    times = [problem.times[v] for v in schedule.sequence]
    placed = place(times, evaluation.boundary, alive, transfers, capacity)
    # All sends end before backward begins, and no fetch begins earlier, so the host holds all values at once.
    host_bytes, most = sum(problem.host_size[v] for v in used), placed.bytes_alive
    # The device's excess is summed over all positions of the schedule, so add the host's excess for each
    # position too. Otherwise the device's excess would outweigh the host's.
    over = problem.host_over(host_bytes) * len(most)
    if capacity is not None:
        over += sum(b - capacity for b in most if b > capacity)
    return OffloadPlan(
        saved=saved,
        schedule=schedule,
        # Without the cost of the first run of each node, which is no recomputation.
        cost=evaluation.cost - sum(schedule_problem.cost) + placed.exposed_time,
        peak_bytes=max(most, default=evaluation.peak_bytes),
        offloaded=used,
        host_bytes=host_bytes,
        over=over,
        placement=placed,
    )
