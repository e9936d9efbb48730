"""Every kind of lie is refused with the solver's name and the first thing wrong."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from remat.errors import SolverError
from remat.solvers import Answer, KnapsackProblem, Solver, Status, verify
from remat.solvers.base import built_in
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.isolation.process import isolated
from remat.solvers.knapsack.native import Native
from remat.solvers.schedule.problem import ScheduleProblem
from remat.solvers.solution import ScheduleAnswer
from remat.testing.graphs import layers

# The optimum is items 1 and 2, worth 9; the relaxation says at most 9; greedy finds 0, worth 8.
PROBLEM = KnapsackProblem((6, 5, 5, 9), (8, 5, 4, 1), 10)
# One of two values fits: keeping the one that costs 5 leaves a cost of 3.
GRAPH = GraphProblem(
    names=("a", "b"),
    inputs=((), ()),
    cost=(3, 5),
    size=(4, 4),
    savable=(True, True),
    recomputable=(True, True),
    in_forward=(True, True),
    needed=(0, 1),
    capacity=6,
)
UNSAVABLE = dataclasses.replace(GRAPH, savable=(True, False))
LAYERS = layers(4).within(100)
# Two values of 4 bytes that a third run reads.
STEP = ScheduleProblem(
    names=("a", "b", "c"),
    inputs=((), (0,), (0, 1)),
    cost=(3, 2, 1),
    size=(4, 4, 1),
    capacity=9,
)


class Heuristic(Solver):
    name = "heuristic"

    def solve(self, problem, **kwargs):
        return []


class Exact(Heuristic):
    name = "exact"
    exact = True


@pytest.mark.parametrize(
    ("problem", "answer", "said"),
    [
        (PROBLEM, None, "returned NoneType where item indices are due"),
        (PROBLEM, 7, "returned int where item indices are due"),
        (PROBLEM, [0, 1.0], "returned 1.0 where item indices are due"),
        (PROBLEM, ["0"], "returned '0' where item indices are due"),
        (PROBLEM, [True, False, False, False], r"returned True .*a mask\? return the indices"),
        (PROBLEM, [0, 4], "returned index 4, but the items are 0 to 3"),
        (PROBLEM, [-1], "returned index -1, but the items are 0 to 3"),
        (PROBLEM, [2, 1, 2], "returned index 2 twice"),
        (PROBLEM, itertools.cycle([1]), "returned index 1 twice"),
        (PROBLEM, [0, 1], "overweight choice: 11 bytes over a capacity of 10, 1 too much"),
        (PROBLEM, Answer([0], value=9), "claims a value of 9, but its own choice has 8"),
        (PROBLEM, Answer([0], value=8.0), "claims a value of 8.0, which is no integer"),
        (PROBLEM, Answer([0], 7), "no choice has a value above 7, but its own choice has 8"),
        (PROBLEM, Answer([1], 6), "no choice has a value above 6, but a greedy choice has 8"),
        (PROBLEM, Answer([0], 9.5), "claims a bound of 9.5, which is no integer"),
        (
            PROBLEM,
            Answer([0], 9, status=Status.OPTIMAL),
            "claims OPTIMAL at 8 and, with it, a bound of 9",
        ),
        (PROBLEM, Answer([0], status=Status.OPTIMAL), "claims OPTIMAL without a bound"),
        (PROBLEM, Answer([0], status="optimal"), "returned 'optimal' as status"),
        (LAYERS, (0, 0), "index 0 twice"),
        (LAYERS, (True,), "node indices are due"),
        (LAYERS, (0, 1), "overweight decision: 113 bytes over a capacity of 100, 13 too much"),
        (LAYERS, Answer((0,), 10**9), "no decision has a cost below 1000000000"),
        (LAYERS, Answer((0,), value=1), "claims a cost of 1"),
        (LAYERS, 7, "where node indices are due"),
        (UNSAVABLE, (1,), "decision that cannot run.*'b'"),
        (STEP, (0, 2, 1), "schedule that cannot run: run 1"),
        (STEP, (0, 1), "'c' never runs"),
        (STEP, (0, 0.5, 2), "returned 0.5 as run 1, where a node's number is due"),
        (STEP, (0, True, 2), "returned True as run 1"),
        (STEP, 7, "returned int where node indices are due"),
        (STEP, itertools.repeat(0), "returned more than 192 runs, 64 for each node"),
        (STEP, ScheduleAnswer((0, 1, 2), 7), "cost below 7, but its own schedule has 6"),
        (STEP, ScheduleAnswer((0, 1, 2), 6.0), "claims a bound of 6.0"),
        (STEP, Answer((0, 1, 2), value=7), "claims a cost of 7, but its own schedule has 6"),
        (STEP.within(8), (0, 1, 2), "peak of 9 bytes .*'c'.* over a capacity of 8, 1 too much"),
    ],
)
def test_a_lie_is_refused_by_name(problem, answer, said) -> None:
    with pytest.raises(SolverError, match=f"^solver 'heuristic' .*{said}") as raised:
        verify(problem, Heuristic(), answer)
    assert raised.value.solver == "heuristic"


def test_an_exact_solver_that_is_beaten_by_greedy_is_refused() -> None:
    with pytest.raises(SolverError, match=r"'exact' claims .* above 5, but a greedy choice"):
        verify(PROBLEM, Exact(), [1])


def test_value_and_weight_are_recomputed_and_indices_sorted() -> None:
    solution = verify(PROBLEM, Heuristic(), np.array([2, 1]))
    assert solution.saved == (1, 2)
    assert {type(i) for i in solution.saved} == {int}
    assert (solution.value, solution.weight, solution.solver) == (9, 10, "heuristic")


def test_the_bound_is_the_least_of_the_claimed_and_the_relaxed() -> None:
    loose = KnapsackProblem((5, 5, 5), (5, 5, 5), 9)
    assert verify(loose, Heuristic(), [0]).bound == 9
    assert verify(loose, Heuristic(), Answer([0], 10_000)).bound == 9
    assert verify(loose, Native(), Answer([0], 6)).bound == 6  # ours, so believed
    assert verify(loose, Heuristic(), Answer([0], 6)).bound == 5  # looked into


def test_optimal_needs_a_proof() -> None:
    loose = KnapsackProblem((5, 5, 5), (5, 5, 5), 9)
    assert verify(loose, Heuristic(), [0]).status is Status.FEASIBLE
    assert verify(loose, Heuristic(), Answer([0], 5)).status is Status.OPTIMAL
    assert verify(loose, Exact(), [0]).status is Status.OPTIMAL
    assert verify(loose, Exact(), Answer([0], status=Status.OPTIMAL)).status is Status.OPTIMAL
    assert verify(loose, Exact(), Answer([0], status=Status.FEASIBLE)).status is Status.FEASIBLE
    tight = KnapsackProblem((5, 5), (5, 5), 10)
    assert verify(tight, Heuristic(), [0, 1]).status is Status.OPTIMAL  # the relaxation proves it


# Greedy finds 124, the relaxation allows 134, and 133 is the optimum.
CLAIMED = KnapsackProblem((6, 5, 4, 3), (60, 51, 42, 31), 13)


class Ours(Native):
    """Derives from one of ours, elsewhere."""

    name = "ours"


@pytest.mark.parametrize("solver", [Exact(), Ours()], ids=["foreign", "derived"])
def test_optimality_that_only_a_plugin_claims_is_not_said(solver) -> None:
    solution = verify(CLAIMED, solver, [1, 2, 3])
    assert (solution.value, solution.status) == (124, Status.FEASIBLE)
    assert (solution.bound, solution.claimed_bound) == (133, 124)
    right = verify(CLAIMED, solver, [0, 2, 3])
    assert (right.status, right.claimed_bound) == (Status.OPTIMAL, None)


def test_without_a_proof_a_claim_stays_a_claim(monkeypatch) -> None:
    monkeypatch.setattr(Native, "cannot_run", classmethod(lambda cls: "not here"))
    solution = verify(CLAIMED, Exact(), [0, 2, 3])
    assert (solution.bound, solution.claimed_bound) == (134, 133)
    assert solution.status is Status.FEASIBLE
    assert verify(CLAIMED, Native(), [0, 2, 3]).status is Status.OPTIMAL


def test_who_is_ours() -> None:
    assert built_in(Native())
    assert not built_in(Ours())
    assert not built_in(Heuristic())
    wrapped = isolated(Native())
    assert built_in(wrapped)
    wrapped.close()


def test_a_claim_about_a_graph_is_looked_into_too() -> None:
    wrong = verify(GRAPH, Heuristic(), Answer([0], status=Status.OPTIMAL))
    assert (wrong.cost, wrong.status, wrong.claimed_bound) == (5, Status.FEASIBLE, 5)
    assert wrong.bound <= 3
    right = verify(GRAPH, Heuristic(), Answer([1], status=Status.OPTIMAL))
    assert (right.cost, right.status, right.claimed_bound) == (3, Status.OPTIMAL, None)


def test_a_strangers_bound_on_schedules_is_a_claim() -> None:
    schedule = verify(STEP, Heuristic(), ScheduleAnswer((0, 1, 0, 2), 8))
    assert (schedule.cost, schedule.bound, schedule.claimed_bound) == (9, 6, 8)
    assert schedule.status is Status.FEASIBLE


def test_a_clock_makes_it_undetermined() -> None:
    assert verify(PROBLEM, Heuristic(), [0]).deterministic
    assert not verify(PROBLEM, Heuristic(), Answer([0], by_clock=True)).deterministic
