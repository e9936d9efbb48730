"""The conformance suite of graph solvers: what remat relies on in any of them.

Run it on your solver with ``pytest --pyargs remat.testing --solver=module:Class``.
"""

from __future__ import annotations

import random

import pytest

from remat.errors import BudgetError
from remat.solvers.base import Solver
from remat.solvers.run import run
from remat.solvers.solution import Status
from remat.testing.graphs import decisions, drawn, layers

#: Run on graph solvers only.
SOLVES = "graph"


@pytest.mark.parametrize("block", range(4))
def test_small_graphs_against_every_decision(solver: Solver, block: int) -> None:
    draw = random.Random(block)
    for seed in range(30 * block, 30 * block + 30):
        problem = drawn(seed, nodes=9)
        every = decisions(problem)
        if not every:
            continue
        least = min(e.saved_bytes for e in every)
        capacity = draw.randint(least, max(e.saved_bytes for e in every) + 1)
        best = min(e.recompute_cost for e in every if e.saved_bytes <= capacity)
        solution = run(solver, problem.within(capacity))
        assert solution.saved_bytes <= capacity
        assert solution.bound <= best <= solution.cost
        if solution.status is Status.OPTIMAL:
            assert solution.cost == best
        if solution.claimed_bound is not None:
            assert solution.claimed_bound <= best


def test_less_than_the_least_is_refused(solver: Solver) -> None:
    problem = next(
        p
        for p in map(drawn, range(1000))
        if min((e.saved_bytes for e in decisions(p)), default=0) > 0
    )
    least = min(e.saved_bytes for e in decisions(problem))
    with pytest.raises(BudgetError, match=str(least)):
        run(solver, problem.within(least - 1))


def test_without_a_capacity_nothing_is_recomputed_that_costs(solver: Solver) -> None:
    assert run(solver, layers(5)).cost == 0


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_layers_keep_to_the_capacity_and_the_answer_repeats(solver: Solver, share: float) -> None:
    problem = layers(10)
    problem = problem.within(int(share * sum(problem.size)))
    first, second = run(solver, problem), run(solver, problem)
    assert first.saved_bytes <= (problem.capacity or 0)
    assert first.bound <= first.cost
    if solver.deterministic:
        assert first.saved == second.saved


def test_a_time_limit_is_taken(solver: Solver) -> None:
    problem = layers(20)
    problem = problem.within(sum(problem.size) // 2)
    assert run(solver, problem, time_limit=5.0).saved_bytes <= (problem.capacity or 0)
