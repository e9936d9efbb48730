"""The frontier: every Pareto-optimal pair, its items, and a tolerance that is kept."""

from __future__ import annotations

import random

import pytest
from frontier_cases import pareto

import remat
from remat.errors import ProblemError
from remat.solvers.knapsack import frontier as module
from remat.solvers.knapsack.frontier import KnapsackFrontier, knapsack_frontier


def by_kernel_or_numpy(problem: remat.KnapsackProblem, most: int = 200_000) -> KnapsackFrontier:
    return knapsack_frontier(problem, most_points=most)


def by_numpy(problem: remat.KnapsackProblem, most: int = 200_000) -> KnapsackFrontier:
    return module._by_numpy(problem, min(problem.capacity, problem.total_weight), most)


BOTH = pytest.mark.parametrize("compute", [by_kernel_or_numpy, by_numpy])


@BOTH
def test_every_pareto_optimal_pair_with_its_items(compute) -> None:
    rng = random.Random(3)
    for _ in range(60):
        n, top = rng.randint(0, 9), rng.choice((2, 20))
        problem = remat.KnapsackProblem(
            [rng.randint(0, top) for _ in range(n)],
            [rng.randint(0, top) for _ in range(n)],
            rng.randint(0, 4 * top),
        )
        found = compute(problem)
        points = zip(found.weights.tolist(), found.values.tolist(), strict=True)
        assert list(points) == pareto(problem)
        assert found.tolerance == 0
        for i in range(len(found)):
            items = found.items(i)
            assert problem.weight_of(items) == found.weights[i]
            assert problem.value_of(items) == found.values[i]
            assert found.best_within(int(found.weights[i])) == i


@BOTH
def test_a_thinned_frontier_keeps_its_tolerance(compute) -> None:
    rng = random.Random(4)
    weights = [rng.randint(1, 10**6) for _ in range(80)]
    values = [rng.randint(1, 10**6) for _ in range(80)]
    problem = remat.KnapsackProblem(weights, values, sum(weights))
    whole, thin = compute(problem), compute(problem, 500)
    assert len(thin) <= 500 < len(whole)
    assert thin.tolerance > 0
    for weight, value in zip(whole.weights.tolist(), whole.values.tolist(), strict=True):
        i = thin.best_within(weight)
        assert thin.weights[i] <= weight
        assert thin.values[i] * (1 + thin.tolerance) >= value * (1 - 1e-12)


def test_knees() -> None:
    # Cheap gain first, then dear gain: the corner is the knee, whichever way it is looked for.
    problem = remat.KnapsackProblem([1, 10], [90, 10], 11)
    found = knapsack_frontier(problem)
    assert found.weights.tolist() == [0, 1, 11]
    assert found.knee() == found.knee(by="chord") == 1
    assert knapsack_frontier(remat.KnapsackProblem([5], [0], 5)).knee() == 0


def test_bad_arguments() -> None:
    with pytest.raises(ProblemError, match="'origin' or 'chord'"):
        knapsack_frontier(remat.KnapsackProblem([1], [1], 1)).knee(by="eye")
