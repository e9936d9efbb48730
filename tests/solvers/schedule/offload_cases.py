"""Small steps with values to offload, and two oracles: every decision tried, and every place of a copy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from remat.errors import ProblemError
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.schedule.offload_problem import (
    CarriedSchedule,
    OffloadPlan,
    OffloadProblem,
    carried,
    evaluate_offloads,
)
from remat.solvers.schedule.offload_search import OffloadSearch, Scheduled
from remat.solvers.schedule.problem import ScheduleProblem
from remat.solvers.schedule.transfers import Transfer


def chain(capacity: int, *, copies: int, again: int = 5, **more: Any) -> OffloadProblem:
    """Three layers and their backward, which reads every layer's value again; a run takes 5.

    Args:
        capacity: bytes.
        copies: time of a copy of the first layer's ten bytes; -1: none of it goes to the host.
        again: cost of each layer.
        more: of the schedule problem.
    """
    step = ScheduleProblem(
        names=("a", "b", "c", "gc", "gb", "ga"),
        inputs=((), (0,), (1,), (2,), (1, 3), (0, 4)),
        cost=(again, again, again, 0, 0, 0),
        size=(10, 4, 1, 1, 1, 1),
        forward=(0, 1, 2),
        backward=(3, 4, 5),
        capacity=capacity,
        **more,
    )
    away = (copies, -1, -1, -1, -1, -1)
    return OffloadProblem(
        schedule_problem=step, times=(5,) * 6, copy_time=away, host_size=step.size
    )


def drawn(seed: int, most: int = 5) -> OffloadProblem:
    """A step of up to so many values, with a capacity between its least peak and that of keeping all."""
    draw = random.Random(seed)
    n = draw.randint(2, most)
    inputs: list[tuple[int, ...]] = [()]
    inputs += [
        tuple(sorted(draw.sample(range(i), min(i, draw.choice((1, 1, 2)))))) for i in range(1, n)
    ]
    size = [draw.randint(1, 12) for _ in range(n)]
    times = [draw.randint(0, 9) for _ in range(n)]
    for k in reversed(range(n)):
        reads = {k} if draw.random() < 0.8 else set()
        if k and draw.random() < 0.4:
            reads.add(k - 1)
        if k < n - 1:
            reads.add(len(inputs) - 1)
        inputs.append(tuple(sorted(reads)))
        size.append(draw.randint(0, 4))
        times.append(draw.randint(0, 9))
    copies = [
        -(-size[i] // draw.choice((1, 2))) if i < n and draw.random() < 0.7 else -1
        for i in range(2 * n)
    ]
    step = ScheduleProblem(
        names=tuple(f"f{i}" for i in range(n)) + tuple(f"b{i}" for i in range(n)),
        inputs=tuple(inputs),
        cost=tuple(times[:n] + [0] * n),
        size=tuple(size),
        forward=tuple(range(n)),
        backward=tuple(range(n, 2 * n)),
        to_end=(n - 1,) if draw.random() < 0.3 else (),
        once=tuple(i for i in range(n) if draw.random() < 0.15),
        resident=draw.randint(0, 3),
        capacity=0,
    )
    problem = OffloadProblem(
        schedule_problem=step, times=tuple(times), copy_time=tuple(copies), host_size=step.size
    )
    low = min(choice.peak_bytes for choice in every_choice(problem))
    high = search_of(problem).decide(range(n), ()).peak_bytes
    capacity = int(low + (high - low) * draw.uniform(0, 0.9))
    return replace(problem, schedule_problem=step.within(capacity))


def cheapest(problem: OffloadProblem) -> int | None:
    """The least cost of all decisions within the capacity, by trying every one; None where none is."""
    capacity = problem.schedule_problem.capacity or 0
    fits = (choice.cost for choice in every_choice(problem) if choice.peak_bytes <= capacity)
    return min(fits, default=None)


def every_choice(problem: OffloadProblem) -> Iterator[OffloadPlan]:
    """Every decision that the host has room for."""
    search, step = search_of(problem), problem.schedule_problem
    n = len(step) // 2
    choices = [
        ("again", "keep", "offload")[: 3 if problem.copy_time[i] >= 0 else 2] for i in range(n)
    ]
    for picked in itertools.product(*choices):
        saved = [i for i, what in enumerate(picked) if what != "again" or i in step.once]
        try:
            sequence, boundary = search.schedule(saved)
            schedule = carried(problem, sequence, boundary)
        except ProblemError:
            continue
        offloaded = [i for i, what in enumerate(picked) if what == "offload"]
        if any(i in schedule.idle and i not in offloaded for i in problem.always):
            continue
        if problem.host_capacity is not None:
            on_host = [
                sum(
                    step.size[i]
                    for i in offloaded
                    if i in schedule.idle and _is_away(schedule, i, at)
                )
                for at in range(len(sequence))
            ]
            if max(on_host, default=0) > problem.host_capacity:
                continue
        yield evaluate_offloads(problem, schedule, offloaded, step.capacity)


def _is_away(schedule: CarriedSchedule, i: int, at: int) -> bool:
    """Whether the host has a copy of a value during a run: from its last use in forward to its next one."""
    ready, needed = schedule.idle[i]
    return ready < at <= needed


def search_of(problem: OffloadProblem) -> OffloadSearch:
    """The search over a step without a graph of PyTorch around it."""
    step = _Step(problem.schedule_problem)
    capacity = problem.schedule_problem.capacity
    assert capacity is not None
    return OffloadSearch(problem, step.graph, range(step.early), step.schedule, capacity)


class _Step:
    """The graph problem of a schedule problem whose forward is its first values, and the schedule of a decision."""

    def __init__(self, step: ScheduleProblem) -> None:
        self.schedule_problem, n = step, len(step.forward)
        self.early = n
        assert step.forward == tuple(range(n))
        free = set(step.to_end).intersection(step.once)  # there in any case
        self.graph = GraphProblem(
            names=step.names[:n],
            inputs=step.inputs[:n],
            cost=step.cost[:n],
            size=tuple(0 if i in free else step.size[i] for i in range(n)),
            savable=(True,) * n,
            recomputable=tuple(i not in step.once for i in range(n)),
            in_forward=(True,) * n,
            needed=tuple(sorted({j for i in step.backward for j in step.inputs[i] if j < n})),
        )

    def schedule(self, saved: Iterable[int]) -> Scheduled:
        """The schedule of a decision: recomputations run right before their first readers."""
        sequence, placed = [*range(self.early)], set(saved)
        for root in self.schedule_problem.backward:
            missing, todo = [], [root]
            while todo:
                j = todo.pop()
                if j not in placed:
                    placed.add(j)
                    missing.append(j)
                    todo.extend(self.schedule_problem.inputs[j])
            sequence += sorted(missing)
        return sequence, self.early


def least_wait(
    times: Sequence[int],
    boundary: int,
    alive: Sequence[int],
    transfers: Sequence[Transfer],
    capacity: int,
) -> int | None:
    """The least time that runs wait over every place of every copy within a capacity; None: none is within."""
    n, waits = len(times), []
    for freed in itertools.product(*(range(t.ready, boundary) for t in transfers)):
        for fetched in itertools.product(*(range(boundary, t.needed + 1) for t in transfers)):
            bytes_alive = list(alive)
            for t, end, begin in zip(transfers, freed, fetched, strict=True):
                for at in (*range(t.ready + 1, end + 1), *range(begin, t.needed)):
                    bytes_alive[at] += t.nbytes
            if n and max(bytes_alive) <= capacity:
                waits.append(_wait(times, boundary, transfers, freed, fetched))
    return min(waits, default=None)


def _wait(
    times: Sequence[int],
    boundary: int,
    transfers: Sequence[Transfer],
    freed: Sequence[int],
    fetched: Sequence[int],
) -> int:
    """Follows the runs and both queues forwards in time."""
    now = out = back = 0
    sent: dict[int, int] = {}
    there: dict[int, int] = {}
    order = sorted(range(len(transfers)), key=lambda i: (transfers[i].needed, i))
    for at in range(len(times)):
        for i, last in enumerate(freed):
            if last == at - 1:
                now = max(now, sent[i])
        for i in _begun(order, fetched, at):
            back = max(back, now) + transfers[i].copy_time
            there[i] = back
        for i, t in enumerate(transfers):
            if t.needed == at:
                now = max(now, there[i])
        now += times[at]
        for i, t in enumerate(transfers):
            if t.ready == at:
                out = max(out, now) + t.copy_time
                sent[i] = out
    return now - sum(times)


def _begun(order: Sequence[int], fetched: Sequence[int], at: int) -> Iterator[int]:
    """Fetches that begin before a run: none before those that are needed earlier."""
    for k, i in enumerate(order):
        begin = max(fetched[j] for j in order[: k + 1])
        if begin == at:
            yield i
