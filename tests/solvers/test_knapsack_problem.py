"""Bad numbers are refused in one line that names the argument and the index."""

from __future__ import annotations

import numpy as np
import pytest

from remat.errors import ProblemError
from remat.solvers.problem import INT64_MAX, KnapsackProblem


def test_sequences_become_tuples_of_int() -> None:
    problem = KnapsackProblem(
        weights=np.array([3, 4]), values=iter([np.int32(5), 6]), capacity=np.int64(7)
    )
    assert problem == KnapsackProblem((3, 4), (5, 6), 7)
    assert {type(x) for x in (*problem.weights, *problem.values, problem.capacity)} == {int}


def test_the_largest_numbers_are_allowed() -> None:
    problem = KnapsackProblem((INT64_MAX,), (INT64_MAX,), INT64_MAX)
    assert problem.total_weight == problem.total_value == INT64_MAX


@pytest.mark.parametrize(
    ("weights", "values", "capacity", "said"),
    [
        ((1, -2), (1, 1), 3, r"^weights\[1\] must be from 0 .* got -2$"),
        ((1, 2), (1, -1), 3, r"^values\[1\] .* got -1$"),
        ((1, 2.0), (1, 1), 3, r"^weights\[1\] must be an integer, got 2.0 \(float\)"),
        ((1, float("nan")), (1, 1), 3, r"^weights\[1\] must be an integer, got nan"),
        ((True, 2), (1, 1), 3, r"^weights\[0\] must be an integer, got True \(bool\)"),
        ((1, 2), (1, np.True_), 3, r"^values\[1\] must be an integer"),
        ((1, "2"), (1, 1), 3, r"^weights\[1\] must be an integer, got '2' \(str\)"),
        ((1, 2), (1,), 3, r"^weights and values must have the same length, got 2 .* 1 "),
        ((1, 2), (1, 1), -1, r"^capacity must be from 0 .* got -1$"),
        ((1, 2), (1, 1), 2**63, r"^capacity must be from 0 to 2\*\*63 - 1, got 92233"),
        ((1, 2), (1, 1), 1.5, r"^capacity must be an integer, got 1.5 \(float\)"),
        ((1, 2), (1, 1), True, r"^capacity must be an integer, got True"),
        ((2**63, 1), (1, 1), 3, r"^weights\[0\] must be from 0 to 2\*\*63 - 1"),
        ((2**62, 2**62), (1, 1), 3, r"^weights must sum to at most 2\*\*63 - 1"),
        ((1, 1), (2**62, 2**62), 3, r"^values must sum to at most 2\*\*63 - 1"),
        ({1, 2}, (1, 1), 3, r"^weights must be an ordered sequence of integers, got set"),
        ("12", (1, 1), 3, r"^weights must be an ordered sequence of integers, got str"),
        (5, (1, 1), 3, r"^weights must be an ordered sequence of integers, got int"),
    ],
)
def test_bad_input_is_refused_in_one_line(weights, values, capacity, said) -> None:
    with pytest.raises(ProblemError, match=said) as raised:
        KnapsackProblem(weights, values, capacity)
    assert "\n" not in str(raised.value)
