"""Small problems with ways, named and drawn, and two oracles: every decision tried, and every place of a copy."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.errors import ProblemError
from remat.solvers.schedule_problem import ScheduleProblem
from remat.solvers.transfers import Transfer
from remat.solvers.ways_bare import search_of
from remat.solvers.ways_problem import Packing, WaysProblem, evaluate_ways, follow


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysCase:
    """A named problem with ways, whose least cost is known.

    Attributes:
        name: kebab-case; test ids show it.
        problem: what to solve.
        optimum: the least cost of any decision, by trying all; None where none is within the capacity.
    """

    name: str
    problem: WaysProblem
    optimum: int | None


@functools.cache
def ways_cases() -> tuple[WaysCase, ...]:
    """The named cases, in a fixed order."""
    return tuple(
        WaysCase(name=name, problem=problem, optimum=cheapest(problem))
        for name, problem in _named().items()
    )


def _chain(
    capacity: int, *, copies: int, again: int = 5, pair: Packing | None = None, **more: Any
) -> WaysProblem:
    """Three layers and their backward, which reads every layer's value again; a run takes 5.

    Args:
        capacity: bytes.
        copies: time of a copy of the first layer's ten bytes; -1: none of it goes to the host.
        again: cost of each layer.
        pair: what packs the first layer's value.
        more: of the step problem.
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
    packings = ((pair,) if pair else (), *((),) * 5)
    return WaysProblem(step=step, times=(5,) * 6, packings=packings, send=away, fetch=away)


def _named() -> dict[str, WaysProblem]:
    half = Packing(name="half", nbytes=5, pack=1, unpack=1, pack_peak=1, unpack_peak=11)
    large = replace(half, pack_peak=20)
    return {
        "all-fits": _chain(100, copies=4),
        "a-copy-beside-the-runs": _chain(16, copies=4),
        "no-time-to-send": _chain(14, copies=4),
        "a-slow-link": _chain(15, copies=40),
        "a-slow-link-and-dear-layers": _chain(15, copies=40, again=500),
        "run-once-only": _chain(15, copies=12, once=(0,)),
        "stays-to-the-end": _chain(15, copies=4, to_end=(0,)),
        "packed": _chain(15, copies=-1, again=500, pair=half),
        "packing-takes-memory": _chain(15, copies=-1, again=500, pair=large),
        "packed-or-sent": _chain(15, copies=20, again=500, pair=half),
        "always-there": _chain(115, copies=4, resident=100),
        "too-little": _chain(9, copies=4),
    }


def drawn(seed: int, most: int = 5) -> WaysProblem:
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
    packings: list[tuple[Packing, ...]] = []
    copies = []
    for i in range(2 * n):
        nbytes = draw.randint(0, size[i])
        pair = Packing(
            name="pair",
            nbytes=nbytes,
            pack=draw.randint(0, 3),
            unpack=draw.randint(0, 3),
            pack_peak=nbytes + draw.randint(0, 2),
            unpack_peak=size[i] + nbytes + draw.randint(0, 1),
        )
        packings.append((pair,) if i < n and draw.random() < 0.5 else ())
        copies.append(-(-size[i] // draw.choice((1, 2))) if i < n and draw.random() < 0.7 else -1)
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
    problem = WaysProblem(
        step=step,
        times=tuple(times),
        packings=tuple(packings),
        send=tuple(copies),
        fetch=tuple(copies),
    )
    search = search_of(problem)
    low, high = search.whole().peak_bytes, search.found(range(n), {}).peak_bytes
    capacity = int(low + (high - low) * draw.uniform(0, 0.9))
    return replace(problem, step=step.within(capacity))


def cheapest(problem: WaysProblem) -> int | None:
    """The least cost of all decisions within the capacity, by trying every one; None where none is."""
    search, step = search_of(problem), problem.step
    n, best = len(step) // 2, None
    choices = [(None, "keep", *problem.ways_of(i)) for i in range(n)]
    for picked in itertools.product(*choices):
        saved = [i for i, way in enumerate(picked) if way is not None or i in step.once]
        try:
            sequence, _, boundary = search.schedule(saved)
            followed = follow(problem, sequence, boundary)
        except ProblemError:
            continue
        ways = {i: way for i, way in enumerate(picked) if isinstance(way, int)}
        done = evaluate_ways(problem, followed, ways, step.capacity)
        if done.peak_bytes <= (step.capacity or 0) and (best is None or done.cost < best):
            best = done.cost
    return best


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
            back = max(back, now) + transfers[i].fetch
            there[i] = back
        for i, t in enumerate(transfers):
            if t.needed == at:
                now = max(now, there[i])
        now += times[at]
        for i, t in enumerate(transfers):
            if t.ready == at:
                out = max(out, now) + t.send
                sent[i] = out
    return now - sum(times)


def _begun(order: Sequence[int], fetched: Sequence[int], at: int) -> Iterator[int]:
    """Fetches that begin before a run: none before those that are needed earlier."""
    for k, i in enumerate(order):
        begin = max(fetched[j] for j in order[: k + 1])
        if begin == at:
            yield i
