"""Bad numbers are refused in one line that names the argument and the index."""

from __future__ import annotations

import numpy as np
import pytest

from remat.errors import ProblemError
from remat.solvers.columns import INT64_MAX
from remat.solvers.problem import KnapsackProblem


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
        ((1, -2), (1, 1), 3, r"weights\[1\] is -2; expected an integer from 0 to 2\*\*63 - 1$"),
        ((1, 2), (1, -1), 3, r"values\[1\] is -1; expected an integer from 0"),
        ((1, 2.0), (1, 1), 3, r"weights\[1\] is 2.0; .*: convert or scale it first$"),
        ((True, 2), (1, 1), 3, r"weights\[0\] is True; expected an integer"),
        ((1, 2), (1, np.True_), 3, r"values\[1\] is (np\.)?True_?; expected an integer"),
        ((1, 2), (1,), 3, r"values has 1 entries; expected 2, one for each weight"),
        ((1, 2), (1, 1), -1, r"capacity is -1; expected an integer from 0"),
        ((1, 2), (1, 1), 2**63, r"capacity is 9223372036854775808; .* from 0 to 2\*\*63 - 1"),
        ((1, 2), (1, 1), 1.5, r"capacity is 1.5; expected an integer"),
        ((2**63, 1), (1, 1), 3, r"weights\[0\] is 9223372036854775808; expected an integer"),
        ((2**62, 2**62), (1, 1), 3, r"weights sums to 9223372036854775808; .* at most 2\*\*63 - 1"),
        ((1, 1), (2**62, 2**62), 3, r"values sums to 9223372036854775808; .* at most 2\*\*63 - 1"),
        ({1, 2}, (1, 1), 3, r"weights is {1, 2}; expected an ordered sequence"),
        ("12", (1, 1), 3, r"weights is '12'; expected an ordered sequence"),
        (5, (1, 1), 3, r"weights is 5; expected an ordered sequence"),
    ],
)
def test_bad_input_is_refused_in_one_line(weights, values, capacity, said) -> None:
    with pytest.raises(ProblemError, match=rf"^KnapsackProblem\.{said}") as raised:
        KnapsackProblem(weights, values, capacity)
    assert "\n" not in str(raised.value)
