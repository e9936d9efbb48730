"""Keep, recompute, pack, offload: the evaluator, where copies stand, and the search against every decision."""

from __future__ import annotations

import random
from typing import Any

import pytest

from remat.errors import BudgetError, ProblemError
from remat.solvers import ways_search
from remat.solvers.schedule_problem import ScheduleProblem
from remat.solvers.transfers import Transfer, place, waited_at
from remat.solvers.ways_bare import search_of, solve_ways
from remat.solvers.ways_problem import (
    OFFLOADED,
    Packing,
    WaysProblem,
    evaluate_ways,
    follow,
)
from remat.testing.ways import WaysCase, cheapest, drawn, least_wait, ways_cases

#: Forward a, b, c of 10, 4, 1 bytes; backward reads c, then b, then a. Every run takes 5.
CHAIN = ScheduleProblem(
    names=("a", "b", "c", "gc", "gb", "ga"),
    inputs=((), (0,), (1,), (2,), (1, 3), (0, 4)),
    cost=(5, 5, 5, 0, 0, 0),
    size=(10, 4, 1, 1, 1, 1),
    forward=(0, 1, 2),
    backward=(3, 4, 5),
    capacity=100,
)
HALVED = Packing(name="half", nbytes=5, pack=2, unpack=3, pack_peak=6, unpack_peak=15)
WAYS = WaysProblem(
    step=CHAIN,
    times=(5,) * 6,
    packings=((HALVED,), *((),) * 5),
    send=(4, 2, -1, -1, -1, -1),
    fetch=(4, 2, -1, -1, -1, -1),
)
RUNS = (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("case", ways_cases(), ids=lambda case: case.name)
def test_named_cases(case: WaysCase) -> None:
    if case.optimum is None:
        with pytest.raises(BudgetError, match=r"no decision with a peak of \d+ bytes"):
            solve_ways(case.problem)
    else:
        assert solve_ways(case.problem).cost == case.optimum


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
    problem = WaysProblem(
        step=step, times=(1,) * n, packings=((),) * n, send=(-1,) * n, fetch=(-1,) * n
    )
    assert solve_ways(problem).cost == cost


def test_named_cases_are_told_apart() -> None:
    """Each way is the only best one of some case, and two are infeasible or free."""
    least = {case.name: case.optimum for case in ways_cases()}
    assert least["all-fits"] == least["a-copy-beside-the-runs"] == 0
    assert least["too-little"] is None
    assert least["a-slow-link"] != least["a-slow-link-and-dear-layers"]
    assert least["packed"] != least["packing-takes-memory"]


def test_a_copy_that_fits_beside_the_runs_costs_nothing() -> None:
    followed = follow(WAYS, RUNS)
    done = evaluate_ways(WAYS, followed, {0: OFFLOADED}, None)
    # Sent beside c, so that it is there while c runs; fetched beside gb, which runs for longer than that.
    assert done.bytes_alive == (10, 14, 15, 6, 16, 12)
    assert (done.cost, done.waited) == (0, 0)


def test_what_memory_has_no_time_for_is_waited_for() -> None:
    followed = follow(WAYS, RUNS)
    done = evaluate_ways(WAYS, followed, {0: OFFLOADED}, 14)
    assert done.bytes_alive == (10, 14, 5, 6, 6, 12)
    assert done.waited == done.cost == 4 + 4


def test_copies_that_stand_elsewhere_are_waited_for() -> None:
    one = Transfer(nbytes=10, ready=0, needed=5, send=4, fetch=4)
    two = Transfer(nbytes=4, ready=1, needed=4, send=2, fetch=2)

    def waited(freed: tuple[int, int], fetched: tuple[int, int]) -> int:
        return waited_at((5,) * 6, 3, (one, two), freed, fetched)

    assert waited((1, 2), (4, 3)) == 0
    assert waited((0, 1), (5, 4)) == 4 + 2 + 4 + 2
    assert waited((0, 2), (4, 3)) == 4


def test_packing_takes_its_time_and_its_memory() -> None:
    followed = follow(WAYS, RUNS)
    done = evaluate_ways(WAYS, followed, {0: 0}, None)
    assert done.bytes_alive == (10, 14, 10, 11, 11, 12)
    assert done.cost == done.packing == 5
    assert done.peak_bytes == 14 + 6  # a and b are there while a is packed


def test_what_is_made_again_is_not_carried_over() -> None:
    followed = follow(WAYS, (0, 1, 2, 3, 4, 0, 5))
    assert set(followed.idle) == {1, 2}
    assert evaluate_ways(WAYS, followed, {0: OFFLOADED}, None).cost == 5


def test_ways_that_a_value_does_not_have_are_refused() -> None:
    with pytest.raises(ProblemError, match="'b' has way 0; expected one of"):
        evaluate_ways(WAYS, follow(WAYS, RUNS), {1: 0}, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"send": (1,)}, "WaysProblem.send has 1 entries, expected 6"),
        ({"fetch": (0, 0, 0, 0, 0, -2)}, r"fetch\[5\] \('ga'\) is -2"),
        ({"times": (0.5, 0, 0, 0, 0, 0)}, r"times\[0\] \('a'\) is 0.5"),
        ({"send": (40, -1, -1, -1, -1, -1)}, r"send\[0\] \('a'\) is 40 and fetch\[0\] is -1"),
        ({"packings": "abcdef"}, "packings is of type str; expected a tuple"),
        ({"packings": (1,) * 6}, r"packings\[0\] \('a'\) is 1; expected a tuple of Packing"),
        ({"step": None}, "step is of type NoneType; expected a ScheduleProblem"),
    ],
)
def test_wrong_fields_are_refused(changes: dict[str, object], message: str) -> None:
    fields = {"step": CHAIN, "times": (5,) * 6, "packings": ((),) * 6, "send": (-1,) * 6}
    with pytest.raises(ProblemError, match=message):
        WaysProblem(**{**fields, "fetch": (-1,) * 6, **changes})  # type: ignore[arg-type]


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
            send=(time := draw.randint(1, 8)),
            fetch=time,
        )
        for _ in range(draw.randint(1, 3))
    ]
    capacity = max(alive) + draw.randint(0, 8)
    placed = place(times, forward, alive, transfers, capacity)
    assert max(placed.bytes_alive) <= capacity
    assert placed.waited == least_wait(times, forward, alive, transfers, capacity)
    assert placed.waited == waited_at(times, forward, transfers, placed.freed, placed.fetched)


@pytest.mark.parametrize("seed", range(0, 2000, 50))
def test_small_problems_are_solved_to_the_optimum(seed: int) -> None:
    problem = drawn(seed, most=4)
    assert solve_ways(problem).cost == cheapest(problem)


def test_local_search_is_never_better_and_mostly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [drawn(seed) for seed in range(60)]
    optimal = [search_of(p).whole() for p in problems]
    monkeypatch.setattr(ways_search, "WHOLE", 0)
    found = [search_of(p).best([range(len(p.step) // 2)]) for p in problems]
    pairs = list(zip(found, optimal, strict=True))
    assert all(a.rank >= b.rank for a, b in pairs)
    assert sum(a.rank == b.rank for a, b in pairs) >= 0.85 * len(pairs)


def test_a_capacity_that_nothing_keeps_to_is_refused() -> None:
    with pytest.raises(BudgetError, match="no decision with a peak of 3 bytes"):
        solve_ways(WaysProblem(
            step=CHAIN.within(3), times=WAYS.times, packings=WAYS.packings, send=WAYS.send, fetch=WAYS.fetch
        ))  # fmt: skip
