"""Check laws, which are properties that must hold for every problem, on many random problems.

Hypothesis, if it is installed, draws the problems; otherwise, problems are drawn from fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.solvers.problem import KnapsackProblem
from remat.testing.families import Draw, drawer

_SPANS = (3, 20, 10**4, 10**9, 2**50)


def holds(law: Callable[[Draw], None], *, draws: int) -> None:
    """Check a law, a function that draws a problem and asserts a property, on ``draws`` random problems.

    A law is checked on the same problems in every run. Hypothesis, if it is installed, tries corner
    cases and reduces a failing problem to a small one.
    """
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st
    except ModuleNotFoundError:
        for seed in range(draws):
            law(drawer(seed))
        return

    @settings(
        max_examples=draws,
        deadline=None,  # a slow solver is not a wrong solver
        derandomize=True,  # the suite must give the same verdict in every run
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        law(lambda low, high: data.draw(st.integers(low, high)))

    check()


def any_problem(draw: Draw, *, most: int = 9) -> KnapsackProblem:
    """Draw a knapsack of up to ``most`` items; weights and values may be zero or equal."""
    # One upper bound for all numbers: some knapsacks have small numbers only, and others huge ones.
    span = _SPANS[draw(0, len(_SPANS) - 1)]
    count = draw(0, most)
    weights = tuple(draw(0, span) for _ in range(count))
    values = tuple(draw(0, span) for _ in range(count))
    return KnapsackProblem(weights, values, draw(0, sum(weights) + 1))


def any_order(draw: Draw, count: int) -> list[int]:
    """Return a random permutation of the numbers from 0 to ``count - 1``."""
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = draw(0, i)
        order[i], order[j] = order[j], order[i]
    return order
