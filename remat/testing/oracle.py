"""The optimum of a knapsack by the simplest means, in integers of any size."""

from __future__ import annotations

from remat.errors import ProblemError
from remat.solvers.problem import KnapsackProblem

MAX_ITEMS = 20


def brute_force(problem: KnapsackProblem) -> int:
    """Return the greatest value of any choice that fits, by trying all of them.

    Raises:
        ProblemError: there are more than 20 items.
    """
    if len(problem) > MAX_ITEMS:
        raise ProblemError(
            f"brute force takes at most {MAX_ITEMS} items, got {len(problem)}: "
            f"give the case an optimum that is known otherwise"
        )
    weights, values = [0], [0]
    for weight, value in zip(problem.weights, problem.values, strict=True):
        weights += [w + weight for w in weights]
        values += [v + value for v in values]
    return max(v for w, v in zip(weights, values, strict=True) if w <= problem.capacity)
