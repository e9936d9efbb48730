"""PyTorch's float signature: decimals mean what they print as."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.errors import ProblemError
from remat.solvers.auto import Auto
from remat.solvers.base import Solver
from remat.solvers.knapsack.dp import DynamicProgram
from remat.solvers.knapsack.float_bridge import knapsack_fn, problem_from_floats
from remat.solvers.knapsack.greedy import Greedy


@pytest.mark.parametrize("solver", [DynamicProgram(), Auto()])
def test_runtime_saved_what_is_saved_and_the_rest(solver: Solver) -> None:
    solve = knapsack_fn(solver)
    assert solve([0.1, 0.1, 0.1], [1.0, 2.0, 3.0], 0.3) == (6.0, [0, 1, 2], [])
    assert solve([0.1, 0.1, 0.1], [1.0, 2.0, 3.0], 0.2) == (5.0, [1, 2], [0])
    total, saved, rest = solve([2, 3, 4, 5], [3, 4, 5, 6], 5)
    assert (total, saved, rest) == (7.0, [0, 1], [2, 3])
    assert isinstance(total, float)
    assert solve([], [], 1.0) == (0.0, [], [])


def test_decimals_are_scaled_exactly() -> None:
    problem = problem_from_floats([0.25, np.float64(0.1), 1], [1.5, 2, 3], 0.349)
    assert problem.weights == (5, 2, 20)
    assert problem.values == (3, 4, 6)
    assert problem.capacity == 6


@pytest.mark.parametrize("room", [0.5, 0.49999999999999994])
def test_what_rounding_puts_over_the_room_fits_it(room: float) -> None:
    solve = knapsack_fn(Greedy())
    assert solve([0.5000000000000001, 0.5000000000000001], [1.0, 2.0], room) == (2.0, [1], [0])
    assert solve([0.5000000000000001] * 2, [1.0, 1.0], 1.0)[1] == [0, 1]


def test_a_byte_of_a_tebibyte_is_no_rounding() -> None:
    whole = 2**40
    over, room = (whole // 2 + 1) / whole, 0.5
    assert knapsack_fn(Greedy())([over], [1.0], room)[1] == []
    assert knapsack_fn(Greedy())([2**50 + 1, 1.5], [1.0, 1.0], 2**50)[1] == [1]
    assert knapsack_fn(Greedy())([2**60 + 1], [1.0], 2**60)[1] == [], "whole numbers are meant"


@pytest.mark.parametrize("n", [3, 7, 49, 107, 161, 187, 257, 273, 400])
def test_every_share_takes_that_many_of_equal_items(n: int) -> None:
    for k in range(0, n + 1, 1 + n // 20):
        problem = problem_from_floats([1 / n] * n, [1] * n, k / n)
        assert problem.capacity // problem.weights[0] == k


@given(
    st.lists(st.integers(1, 2**36), min_size=1, max_size=40),
    st.integers(0, 2**38),
    st.data(),
)
def test_what_fits_in_bytes_fits_as_pytorch_writes_it(sizes, inputs, data) -> None:
    """Sizes over 10^9, over the difference of two sums so made; the inputs weigh half as much."""
    inputs = min(inputs, sum(sizes) // 2)
    span = (inputs + sum(sizes)) / 1e9 - inputs / 1e9
    memory = [s / 1e9 / span for s in sizes]
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    room = sum(sizes[i] for i in chosen) / sum(sizes)
    problem = problem_from_floats(memory, [1.0] * len(sizes), room)
    assert problem.weight_of(chosen) <= problem.capacity
    others = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    if sum(sizes[i] for i in others) > sum(sizes[i] for i in chosen):
        assert problem.weight_of(others) > problem.capacity, "a byte too much is too much"


floats = st.floats(0, 1e300, allow_nan=False)


@given(st.lists(st.tuples(floats, floats), max_size=6), floats)
def test_what_fits_the_integers_fits_the_floats(items, room) -> None:
    memory, runtimes = [m for m, _ in items], [r for _, r in items]
    total, saved, rest = knapsack_fn(DynamicProgram())(memory, runtimes, room)
    assert sorted(saved + rest) == list(range(len(items)))
    assert math.fsum(memory[i] for i in saved) <= room * (1 + 1e-15)
    assert total == math.fsum(runtimes[i] for i in saved)


@pytest.mark.parametrize(
    ("memory", "runtimes", "room", "said"),
    [
        ([0.1, math.nan], [1, 1], 1, r"^memory\[1\] must be finite, got nan"),
        ([0.1, math.inf], [1, 1], 1, r"^memory\[1\] must be finite, got inf"),
        ([-0.1, 0.1], [1, 1], 1, r"^memory\[0\] must not be negative, got -0.1"),
        ([0.1, 0.1], [1, -1], 1, r"^runtimes\[1\] must not be negative, got -1"),
        ([0.1, 0.1], [1, math.nan], 1, r"^runtimes\[1\] must be finite"),
        ([0.1, 0.1], [1, 1], math.nan, r"^max_memory must be finite, got nan"),
        ([0.1, 0.1], [1, 1], -1e-9, r"^max_memory must not be negative, got -1e-09"),
        ([0.1, "0.1"], [1, 1], 1, r"^memory\[1\] must be a number, got '0.1'"),
        ([0.1, True], [1, 1], 1, r"^memory\[1\] must be a number, got True"),
        ([0.1, 0.1], [1], 1, r"^memory and runtimes must have the same length, got 2 and 1"),
    ],
)
def test_bad_floats_are_refused(memory, runtimes, room, said) -> None:
    with pytest.raises(ProblemError, match=said):
        knapsack_fn(DynamicProgram())(memory, runtimes, room)
