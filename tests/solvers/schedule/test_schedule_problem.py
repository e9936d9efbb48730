"""Schedule problems: what is refused, what a schedule takes and costs, and what solvers find."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import remat
from remat.errors import BudgetError, ProblemError
from remat.solvers.kernel import missing
from remat.solvers.knapsack.native import Native
from remat.solvers.run import run
from remat.solvers.schedule.annealing import improve
from remat.solvers.schedule.core import schedule_core
from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule, least_peak
from remat.testing.oracle import optimum
from remat.testing.samples import SMALL, solved
from remat.testing.steps import layered


def there_and_back(cost: tuple[int, ...], capacity: int | None = None) -> ScheduleProblem:
    """A chain, and a second chain whose nodes also read those of the first, from the last to the first."""
    half = len(cost) // 2
    forward = [()] + [(k - 1,) for k in range(1, half)]
    backward = [(half - 1,)] + [(half + k - 1, half - 1 - k) for k in range(1, half)]
    return ScheduleProblem(
        names=tuple(f"n{i}" for i in range(2 * half)),
        inputs=(*forward, *backward),
        cost=cost,
        size=(4,) * (2 * half),
        capacity=capacity,
    )


def step(**changes: Any) -> ScheduleProblem:
    """Two values of 4 bytes that a third run reads, with the given fields changed."""
    fields: dict[str, Any] = {
        "names": ("a", "b", "c"),
        "inputs": ((), (0,), (0, 1)),
        "cost": (3, 2, 1),
        "size": (4, 4, 1),
    }
    return ScheduleProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ("a", "a", "c")}, "names has 'a' twice"),
        ({"names": "abc"}, "names is 'abc'; expected an ordered sequence"),
        ({"names": ("a", "b", 3)}, r"names\[2\] is 3; expected text"),
        ({"cost": (3, 2)}, "cost has 2 entries; expected 3"),
        ({"size": (2**62, 2**62, 2**62)}, "size sums to .*use a coarser unit"),
        ({"size": (4, True, 1)}, r"size\[1\] \('b'\) is True"),
        (
            {"inputs": ((), (2,), (0, 1))},
            r"inputs\[1\] \('b'\) has node 2; expected earlier nodes only.*cycle",
        ),
        ({"capacity": "8GiB"}, "capacity is '8GiB'"),
        ({"resident": -1}, "resident is -1"),
        ({"extra": (0, 1)}, "extra has 2 entries"),
        ({"part_of": (-1, -1)}, "part_of has 2 entries"),
        ({"once": (0, 0)}, "once names a node twice"),
        ({"once": (5,)}, r"once\[0\] is 5; expected an integer from 0 to 2"),
        ({"to_end": (9,)}, r"to_end\[0\] is 9"),
        ({"at_start": (1,)}, "inputs, a cost or extra bytes for 'b', which is there without a run"),
        (
            {"part_of": (-1, 0, -1)},
            "inputs, a cost or extra bytes for 'b', which is part of another node",
        ),
        ({"ordered": (1, 0)}, "ordered has 'b' before 'a'; expected nodes in the problem's own"),
        ({"forward": (0,), "backward": (0,)}, "forward and .backward both name 'a'"),
        ({"cost": (0, 2, 1), "at_start": (0,), "once": (0,)}, "at_start and .once both name 'a'"),
        (
            {"forward": (2,), "backward": (1,)},
            "forward names 'c', which reads a value that is only there after",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        step(**changes)


def test_empty_columns_are_filled_in() -> None:
    assert (step().part_of, step().extra) == ((-1, -1, -1), (0, 0, 0))
    assert step() == step(part_of=(-1, -1, -1), extra=(0, 0, 0))


def test_values_stay_from_their_run_to_the_last_that_reads_them() -> None:
    done = evaluate_schedule(step(), (0, 1, 2))
    assert done.bytes_alive == (4, 8, 9)
    assert (done.cost, done.peak_bytes, done.boundary) == (6, 9, 3)


def test_a_later_run_stands_for_the_value_from_then_on() -> None:
    problem = step(
        names=("a", "b", "c", "d"),
        inputs=((), (0,), (1,), (0, 2)),
        cost=(3, 2, 1, 1),
        size=(8, 1, 1, 1),
    )
    assert evaluate_schedule(problem, (0, 1, 2, 3)).bytes_alive == (8, 9, 10, 10)
    again = evaluate_schedule(problem, (0, 1, 2, 0, 3))
    assert again.bytes_alive == (8, 9, 2, 9, 10)
    assert again.cost == 10


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ((0, 2, 1), r"run 1 \('c'\) comes before its input 'b' is there"),
        ((0, 1), "'c' never runs"),
        ((0, 1, 2, 3), "run 3 is of node 3, but the nodes are 0 to 2"),
        ((0, 1, 1, 2), "run 2 is the second of 'b', which may run once only"),
    ],
)
def test_schedules_that_cannot_run(sequence: tuple[int, ...], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        evaluate_schedule(step(once=(1,)), sequence)


def test_roles_of_a_training_step() -> None:
    """Inputs are there at the start, tangents at the boundary, outputs stay, parts come along."""
    problem = ScheduleProblem(
        names=("x", "f", "mask", "tangent", "b"),
        inputs=((), (0,), (), (), (2, 3)),
        cost=(0, 2, 0, 0, 3),
        size=(10, 4, 1, 6, 5),
        part_of=(-1, -1, 1, -1, -1),
        extra=(0, 7, 0, 0, 0),
        at_start=(0,),
        forward=(1,),
        at_boundary=(3,),
        to_end=(0, 1, 4),
        resident=100,
    )
    assert problem.backward == (4,)  # it reads what is only there then
    done = evaluate_schedule(problem, (1, 4))
    assert done.bytes_alive == (100 + 10 + 4 + 1 + 7, 100 + 10 + 4 + 1 + 6 + 5)
    assert done.boundary == 1
    with pytest.raises(ProblemError, match="'f' first runs at 1, after the boundary at 0"):
        evaluate_schedule(dataclasses.replace(problem, inputs=((), (0,), (), (), (3,))), (4, 1))
    with pytest.raises(ProblemError, match="run 1 is of 'mask', which has no runs of its own"):
        evaluate_schedule(problem, (1, 2, 4))


def test_the_least_peak_names_the_node_that_shows_it() -> None:
    assert least_peak(step()) == (9, 2)
    with pytest.raises(BudgetError, match="at least 9: 'c' alone takes that much"):
        remat.solve(step(capacity=8))
    with pytest.raises(BudgetError, match="at least 8: what stays to the end takes that much"):
        remat.solve(step(inputs=((), (), ()), to_end=(0, 1), capacity=7))


def test_isolation_passes_refusals_on() -> None:
    with pytest.raises(BudgetError, match="no schedule with a peak of 4 bytes was found"):
        remat.solve(
            step(inputs=((), (0,), (1,)), size=(2, 2, 2), once=(0, 1, 2), to_end=(0,), capacity=4),
            "greedy",
            isolation="process",
        )


needs_kernel = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.slow
@needs_kernel
def test_the_annealer_finds_what_trying_everything_finds() -> None:
    for problem in (p for sample in SMALL if sample.kind == "schedule" for p in sample.draw()):
        found = solved(Native(), problem)
        assert (None if found is None else found.cost) == optimum(problem)


@pytest.mark.slow
@needs_kernel
def test_known_schedules_are_never_made_worse() -> None:
    problem = layered(60, width=0.3, seed=5)
    full = evaluate_schedule(problem, problem.order).peak_bytes
    first = run(Native(), problem.within(full * 3 // 4))
    problem = problem.within(full * 3 // 4).with_hints([first.sequence])
    # A search as short as this finds nothing as good by itself.
    assert run(Native(), problem, time_limit=1e-3).cost <= first.cost


@needs_kernel
def test_sums_beyond_doubles_are_rounded_up() -> None:
    problem = layered(30, width=0.3, seed=6)
    vast = dataclasses.replace(problem, size=tuple(2**45 * s + 1 for s in problem.size))
    core = schedule_core(vast)
    full = evaluate_schedule(vast, vast.order).peak_bytes
    assert core.shift > 0
    assert run(Native(), vast.within(full * 9 // 10)).peak_bytes <= full * 9 // 10


def test_what_comes_after_something_late_is_late() -> None:
    problem = ScheduleProblem(
        names=("tangent", "late", "after", "end"),
        inputs=((), (0,), (), (1, 2)),
        cost=(0, 1, 1, 1),
        size=(1, 1, 1, 1),
        capacity=10,
        at_boundary=(0,),
        ordered=(1, 2),
    )
    assert problem.backward == (1, 2, 3)
    assert remat.solve(problem).cost == optimum(problem) == 3


@needs_kernel
def test_the_kernel_is_never_worse_than_the_given_order_with_evictions() -> None:
    problem = there_and_back(cost=(1,) * 240, capacity=120)
    greedy = remat.solve(problem, "greedy")
    assert remat.solve(problem, time_limit=0.5).cost <= greedy.cost


@needs_kernel
def test_runs_keep_the_given_order_where_memory_allows() -> None:
    free = range(5, 25)
    problem = ScheduleProblem(
        names=("cheap", "dear", "both", "wide", "sum", *(f"free{i}" for i in free), "end"),
        inputs=((), (), (0, 1), (2,), (3,), *((4,) for _ in free), (0, 1, 4, *free)),
        cost=(10, 30, 1, 1, 1, *(1 for _ in free), 1),
        size=(8, 8, 1, 16, 1, *(0 for _ in free), 1),
    )
    # While "wide" is alive, only one of "cheap" and "dear" fits; the other one is recomputed.
    start = (*range(25), 1, 25)
    capacity = evaluate_schedule(problem, start).peak_bytes
    assert capacity < evaluate_schedule(problem, problem.order).peak_bytes
    found = improve(problem.within(capacity), start, 0, moves=20_000)
    best, _ = found[0]
    assert best == (*range(25), 0, 25)
    assert (start, 0) in found


@needs_kernel
def test_every_recomputation_is_read() -> None:
    problem = there_and_back(cost=(1, 1, 10_000) * 40)
    for capacity in range(60, 200, 20):
        found = improve(problem.within(capacity), problem.order, 0, moves=20_000)
        for sequence, _ in found:
            for p, node in enumerate(sequence[:-1]):
                following = sequence[p + 1 :]
                end = following.index(node) if node in following else len(following)
                assert any(node in problem.inputs[reader] for reader in following[:end]), (p, node)
