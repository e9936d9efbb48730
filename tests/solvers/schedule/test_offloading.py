"""Keep, recompute, offload: the evaluator, where copies stand, and the search against every decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from offload_cases import chain, cheapest, drawn, least_wait, search_of

from remat.errors import ProblemError
from remat.solvers.schedule.offload_problem import (
    OffloadPlan,
    OffloadProblem,
    carried,
    evaluate_offloads,
)
from remat.solvers.schedule.transfers import Transfer, exposed_time_at, place

Make = Callable[[int, int], OffloadProblem]
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
    found = searched(problem)
    assert (None if found.over else found.cost) == least == cheapest(problem)


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


@pytest.mark.parametrize("seed", range(80))
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


def bounded(seed: int, most: int = 5) -> OffloadProblem:
    """A step whose host has room for a part of what may go there, and of which some values must go there."""
    problem, draw = drawn(seed, most), random.Random(seed)
    able = [v for v, time in enumerate(problem.copy_time) if time >= 0]
    room = int(draw.uniform(0, 0.8) * sum(problem.schedule_problem.size[v] for v in able))
    always = tuple(v for v in able if draw.random() < 0.2)
    return replace(problem, host_capacity=room, always=always)


def searched(problem: OffloadProblem) -> OffloadPlan:
    """The search from both ends: all saved, and all recomputed."""
    return search_of(problem).best([problem.schedule_problem.forward, ()])


@pytest.mark.parametrize(("make", "share"), [(drawn, 0.85), (bounded, 0.8)])
def test_the_search_is_never_better_than_the_optimum_and_mostly_as_good(
    make: Make, share: float
) -> None:
    problems = [make(seed, 4) for seed in range(0, 2000, 50)]
    found = [*map(searched, problems)]
    pairs = [
        (None if choice.over else choice.cost, cheapest(problem))
        for choice, problem in zip(found, problems, strict=True)
    ]
    feasible = [(cost, least) for cost, least in pairs if least is not None]
    assert len(feasible) > 20
    assert all(cost is None or (least is not None and cost >= least) for cost, least in pairs)
    equal = sum(cost == least for cost, least in feasible)
    assert equal >= share * len(feasible), f"{equal} of {len(feasible)}"
    for choice, problem in zip(found, problems, strict=True):
        host = problem.host_capacity
        assert host is None or choice.over or choice.host_bytes <= host
