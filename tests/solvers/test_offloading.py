"""Keep, recompute, offload: the evaluator, where copies stand, and the search against every decision."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from offload_cases import chain, cheapest, drawn, least_wait, search_of

from remat.errors import ProblemError
from remat.solvers import offload_search
from remat.solvers.offload_problem import OffloadProblem, carried, evaluate_offloads
from remat.solvers.schedule_problem import ScheduleProblem
from remat.solvers.transfers import Transfer, exposed_time_at, place

#: Steps of three layers, each with the least cost of any decision; None: none is within the capacity.
CASES: dict[str, tuple[OffloadProblem, int | None]] = {
    "all-fits": (chain(100, copies=4), 0),
    "a-copy-beside-the-runs": (chain(16, copies=4), 0),
    "no-time-to-send": (chain(14, copies=4), 5),
    "a-slow-link": (chain(15, copies=40), 5),
    "a-slow-link-and-dear-layers": (chain(15, copies=40, again=500), 75),
    "run-once-only": (chain(15, copies=12, once=(0,)), 19),
    "stays-to-the-end": (chain(15, copies=4, to_end=(0,)), 5),
    "always-there": (chain(115, copies=4, resident=100), 4),
    "too-little": (chain(9, copies=4), None),
}
#: Forward a, b, c of 10, 4, 1 bytes; backward reads c, then b, then a. Every run takes 5.
CHAIN = chain(100, copies=4)
RUNS = (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", CASES)
def test_named_cases(name: str) -> None:
    problem, least = CASES[name]
    found = search_of(problem).best([range(3)])
    assert (None if found.over else found.cost) == least == cheapest(problem)


@pytest.mark.parametrize(
    ("more", "cost"),
    [
        # Nobody reads `b`, and nobody says when it runs: it does so in forward.
        ({"inputs": ((), (0,), (0,)), "cost": (1, 1, 0), "size": (10, 10, 1), "backward": (2,), "capacity": 50}, 0),
        # What runs once, and forward does not need, runs in backward.
        ({"inputs": ((), (), (0,), (1, 2)), "cost": (1, 1, 0, 0), "size": (10, 10, 1, 1), "once": (1,),
          "forward": (0,), "backward": (2, 3), "capacity": 12}, 0),
        # So does what takes no memory, and then what it reads.
        ({"inputs": ((), (), (1,), (0,), (2, 3)), "cost": (1, 1, 1, 0, 0), "size": (10, 10, 0, 1, 1),
          "forward": (0,), "backward": (3, 4), "capacity": 12}, 0),
    ],
)  # fmt: skip
def test_what_forward_does_not_need_may_run_late(more: dict[str, Any], cost: int) -> None:
    n = len(more["inputs"])
    step = ScheduleProblem(names=tuple("abcde"[:n]), **more)
    problem = OffloadProblem(step=step, times=(1,) * n, copy_time=(-1,) * n)
    found = search_of(problem).best([range(n - len(more["backward"]))])
    assert (found.over, found.cost) == (0, cost)


def test_a_copy_that_fits_beside_the_runs_costs_nothing() -> None:
    done = evaluate_offloads(CHAIN, carried(CHAIN, RUNS), [0], None)
    # Sent beside c, so that it is there while c runs; fetched beside gb, which runs for longer than that.
    assert done.placement.bytes_alive == (10, 14, 15, 6, 16, 12)
    assert (done.cost, done.placement.exposed_time) == (0, 0)


def test_what_memory_has_no_time_for_is_waited_for() -> None:
    done = evaluate_offloads(CHAIN, carried(CHAIN, RUNS), [0], 14)
    assert done.placement.bytes_alive == (10, 14, 5, 6, 6, 12)
    assert done.placement.exposed_time == done.cost == 4 + 4


def test_copies_that_stand_elsewhere_are_waited_for() -> None:
    one = Transfer(nbytes=10, ready=0, needed=5, copy_time=4)
    two = Transfer(nbytes=4, ready=1, needed=4, copy_time=2)

    def exposed_time(freed: tuple[int, int], fetched: tuple[int, int]) -> int:
        return exposed_time_at((5,) * 6, 3, (one, two), freed, fetched)

    assert exposed_time((1, 2), (4, 3)) == 0
    assert exposed_time((0, 1), (5, 4)) == 4 + 2 + 4 + 2
    assert exposed_time((0, 2), (4, 3)) == 4


def test_what_is_made_again_is_not_carried_over() -> None:
    schedule = carried(CHAIN, (0, 1, 2, 3, 4, 0, 5))
    assert set(schedule.idle) == {1, 2}
    assert evaluate_offloads(CHAIN, schedule, [0], None).cost == 5


def test_what_must_not_be_offloaded_is_refused() -> None:
    with pytest.raises(ProblemError, match="'b' is offloaded, and must not be"):
        evaluate_offloads(CHAIN, carried(CHAIN, RUNS), [1], None)


@pytest.mark.parametrize("seed", range(150))
def test_no_placement_of_copies_waits_less(seed: int) -> None:
    draw = random.Random(seed)
    forward, backward = draw.randint(1, 4), draw.randint(1, 4)
    n = forward + backward
    times = [draw.randint(0, 5) for _ in range(n)]
    alive = [draw.randint(0, 9) for _ in range(n)]
    transfers = [
        Transfer(
            nbytes=draw.randint(1, 6),
            ready=draw.randrange(forward),
            needed=draw.randrange(forward, n),
            copy_time=draw.randint(1, 8),
        )
        for _ in range(draw.randint(1, 3))
    ]
    capacity = max(alive) + draw.randint(0, 8)
    placed = place(times, forward, alive, transfers, capacity)
    assert max(placed.bytes_alive) <= capacity
    assert placed.exposed_time == least_wait(times, forward, alive, transfers, capacity)
    assert placed.exposed_time == exposed_time_at(
        times, forward, transfers, placed.freed, placed.fetched
    )


@pytest.mark.parametrize("seed", range(0, 2000, 50))
def test_small_problems_are_solved_to_the_optimum(seed: int) -> None:
    problem = drawn(seed, most=4)
    found = search_of(problem).best([range(len(problem.step) // 2)])
    assert (None if found.over else found.cost) == cheapest(problem)


def test_local_search_is_never_better_and_mostly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [drawn(seed) for seed in range(60)]
    optimal = [search_of(p).whole() for p in problems]
    monkeypatch.setattr(offload_search, "WHOLE", 0)
    found = [search_of(p).best([range(len(p.step) // 2)]) for p in problems]
    pairs = list(zip(found, optimal, strict=True))
    assert all(a.rank >= b.rank for a, b in pairs)
    assert sum(a.rank == b.rank for a, b in pairs) >= 0.85 * len(pairs)


def bounded(seed: int, most: int = 4) -> OffloadProblem:
    """A step whose host has room for a part of what may go there, and of which some values must go there."""
    problem, draw = drawn(seed, most), random.Random(seed)
    able = [v for v, time in enumerate(problem.copy_time) if time >= 0]
    room = int(draw.uniform(0, 0.8) * sum(problem.step.size[v] for v in able))
    always = tuple(v for v in able if draw.random() < 0.2)
    return replace(problem, host_capacity=room, always=always)


@pytest.mark.parametrize("seed", range(0, 3000, 50))
def test_the_host_is_never_fuller_than_its_bound(seed: int) -> None:
    problem = bounded(seed)
    found = search_of(problem).best([range(len(problem.step) // 2)])
    assert (None if found.over else found.cost) == cheapest(problem)


def test_local_search_keeps_to_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [bounded(seed, 5) for seed in range(60)]
    optimal = [search_of(p).whole() for p in problems]
    assert sum(not a.over for a in optimal) > 30
    assert any(
        search_of(replace(p, host_capacity=None)).whole().cost < a.cost
        for p, a in zip(problems, optimal, strict=True)
        if not a.over
    )
    monkeypatch.setattr(offload_search, "WHOLE", 0)
    found = [search_of(p).best([range(len(p.step) // 2)]) for p in problems]
    pairs = list(zip(found, optimal, strict=True))
    assert all(a.rank >= b.rank for a, b in pairs)
    assert sum(a.rank == b.rank for a, b in pairs) >= 0.8 * len(pairs)
    assert all(
        a.over or a.host_bytes <= (p.host_capacity or 0)
        for a, p in zip(found, problems, strict=True)
    )
