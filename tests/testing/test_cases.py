"""The suite's data: the oracle and the families.

Exact solvers prove the certificates of cases in ``tests/solvers/test_conformance.py``.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from remat.errors import ProblemError
from remat.solvers import KnapsackProblem
from remat.testing.families import family
from remat.testing.oracle import brute_force


def test_the_oracle_takes_few_items_only() -> None:
    with pytest.raises(ProblemError, match="at most 20 items, got 21"):
        brute_force(KnapsackProblem((1,) * 21, (1,) * 21, 3))


def test_families_are_what_the_literature_says() -> None:
    def pairs(name: str) -> list[tuple[int, int]]:
        problem = family(name, items=200, span=1_000, share=50, seed=3)
        return list(zip(problem.weights, problem.values, strict=True))

    assert all(v == w + 100 for w, v in pairs("strongly-correlated"))
    assert all(w == v + 100 for w, v in pairs("inverse-strongly-correlated"))
    assert all(abs(v - w - 100) <= 2 for w, v in pairs("almost-strongly-correlated"))
    assert all(abs(v - w) <= 100 for w, v in pairs("weakly-correlated"))
    assert all(v == w for w, v in pairs("subset-sum"))
    assert all(100_000 <= w <= 100_100 and v <= 1_000 for w, v in pairs("similar-weights"))
    assert all(
        v - w == (300 if w % 6 == 0 else 200) for w, v in pairs("multiple-strongly-correlated")
    )
    assert all(v % 3 == 0 and 0 <= v - w < 3 for w, v in pairs("profit-ceiling"))
    assert all(abs(v - 2 / 3 * (4e6 - (w - 2_000) ** 2) ** 0.5) < 2 for w, v in pairs("circle"))
    for base in ("uncorrelated", "weakly-correlated", "strongly-correlated"):
        assert len({Fraction(w, v) for w, v in pairs(f"spanner-{base}")}) <= 2
