"""Small random problems with ways, and two oracles: every decision tried, and every place of a copy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from remat.errors import ProblemError
from remat.solvers.schedule_problem import ScheduleProblem
from remat.solvers.transfers import Transfer
from remat.solvers.ways_bare import search_of
from remat.solvers.ways_problem import Packing, WaysProblem, evaluate_ways, follow


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
