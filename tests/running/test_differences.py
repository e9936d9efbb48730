"""Differences between the results of two runs, and their descriptions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from remat.running.differences import first_difference


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "y differs in 1 of 2 elements, first at [1]: was 2.0, is 3.0"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "y differs in 1 of 1 elements, first at [0]: was 0.0, is -0.0"),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), None),
        (torch.tensor([math.nan]), torch.tensor([1.0]), "y differs in 1 of 1 elements, first at [0]: was nan, is 1.0"),
        (torch.tensor([1j]), torch.tensor([1j]), None),
        (torch.tensor([1j]), torch.tensor([2j]), "y differs in 1 of 1 elements, first at [0]: was 1j, is 2j"),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), "y was torch.float32 [1], is torch.float64 [1]"),
        (torch.tensor(1.0), torch.ones(1), "y was torch.float32 [], is torch.float32 [1]"),
        (torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2), None),
        (torch.empty(0), torch.empty(0), None),
        (3, 3, None),
        (3, 4, "y was 3, is 4"),
        (None, None, None),
        (None, torch.ones(1), "y was None, is tensor([1.])"),
    ],
)  # fmt: skip
def test_the_first_difference_is_told(one: Any, other: Any, says: str | None) -> None:
    assert first_difference({"x": 1, "y": one}, {"x": 1, "y": other}) == says


def test_what_is_gone_or_new_is_told() -> None:
    assert first_difference({"x": 1}, {}) == "x is gone"
    assert first_difference({}, {"x": 1}) == "x is new"
