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


def by_dominance(problem: KnapsackProblem) -> int:
    """Return the greatest value of any choice that fits, item by item.

    Keeps every weight that can be reached, with the most value there, unless something lighter is worth
    as much. Time and memory grow with the number of such weights: for sums up to millions.

    Source: G. L. Nemhauser, Z. Ullmann, "Discrete dynamic programming and capital allocation",
    Management Science 15 (1969).
    """
    best = {0: 0}  # weight: most value
    for weight, value in sorted(zip(problem.weights, problem.values, strict=True)):
        states = dict(best)
        for w, v in best.items():
            if w + weight <= problem.capacity and v + value > states.get(w + weight, -1):
                states[w + weight] = v + value
        best, top = {}, -1
        for w in sorted(states):
            if states[w] > top:
                best[w] = top = states[w]
    return max(best.values())
