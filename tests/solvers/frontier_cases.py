"""The frontier of a knapsack, by trying every choice."""

from __future__ import annotations

from itertools import combinations

from remat.solvers.problem import KnapsackProblem


def pareto(problem: KnapsackProblem) -> list[tuple[int, int]]:
    """(weight, value) of every choice that fits and that no lighter or equal one reaches, by weight."""
    n = len(problem)
    pairs = sorted(
        (problem.weight_of(c), -problem.value_of(c))
        for k in range(n + 1)
        for c in combinations(range(n), k)
        if problem.weight_of(c) <= problem.capacity
    )
    best, points = -1, []
    for weight, value in pairs:
        if -value > best:
            best = -value
            points.append((weight, best))
    return points
