"""What the compiled kernel promises beyond the conformance suite: optima of large problems, and its clock."""

from __future__ import annotations

import pytest

from remat.solvers.base import unavailable
from remat.solvers.knapsack.native import Native
from remat.solvers.run import run
from remat.solvers.solution import Status
from remat.testing.families import family

pytestmark = pytest.mark.skipif(
    unavailable(Native) is not None, reason=f"{unavailable(Native)} (nothing to test)"
)


@pytest.mark.parametrize(
    ("name", "items", "span", "share", "seed", "best"),  # the optimum, by a table over capacities
    [
        ("circle", 400, 30_000, 50, 2, 5_945_369),
        ("inverse-strongly-correlated", 500, 10_000, 30, 2, 811_308),
        ("multiple-strongly-correlated", 300, 30_000, 50, 5, 3_676_763),
        ("profit-ceiling", 400, 30_000, 50, 4, 3_025_911),
        ("strongly-correlated", 500, 10_000, 30, 4, 1_043_741),
    ],
)
def test_what_outgrows_the_core_is_the_optimum_too(
    name: str, items: int, span: int, share: int, seed: int, best: int
) -> None:
    problem = family(name, items=items, span=span, share=share, seed=seed)
    solution = run(Native(), problem)
    assert solution.status is Status.OPTIMAL
    assert solution.value == best


@pytest.mark.parametrize(
    ("name", "items"),
    [
        # OR-Tools' branch and bound does not finish these in 20 seconds.
        ("strongly-correlated", 500),
        # The room beside the break solution must be priced: linear bounds and one on the number of
        # items leave gaps here that no enumeration closes.
        ("circle", 1_000),
        ("profit-ceiling", 1_000),
        ("inverse-strongly-correlated", 1_000),
    ],
)
@pytest.mark.parametrize("share", [10, 50, 90])
def test_hard_families_with_seven_digits_are_proven(name: str, items: int, share: int) -> None:
    solution = run(Native(), family(name, items=items, span=10**7, share=share, seed=1))
    assert solution.status is Status.OPTIMAL
    assert solution.deterministic


def test_a_clock_ends_the_search_with_a_bound_that_holds() -> None:
    problem = family("circle", items=5_000, span=10**7, share=50, seed=11)
    solution = run(Native(), problem, time_limit=0.05)
    assert solution.bound >= solution.value
    if solution.status is Status.FEASIBLE:
        assert not solution.deterministic
