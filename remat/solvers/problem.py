"""The 0/1 knapsack problem, in plain integers.

An item is an expensive candidate of a joint graph. Its weight is the bytes that saving it takes, its
value the recompute cost that saving it avoids.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from remat.errors import ProblemError

INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class KnapsackProblem:
    """Pick items of the greatest total value whose total weight stays within the capacity.

    Arguments may be any ordered iterables of integers, NumPy's included; they are kept as tuples
    of ``int``. Every number and both sums lie between 0 and 2**63 - 1.

    Args:
        weights: bytes each item takes if saved.
        values: recompute cost each item avoids if saved; one per weight.
        capacity: bytes that may be saved in total.

    Raises:
        ProblemError: an argument is not what it must be; the message names it, with the index.
    """

    weights: tuple[int, ...]
    values: tuple[int, ...]
    capacity: int

    def __post_init__(self) -> None:
        weights = _integers("weights", self.weights)
        values = _integers("values", self.values)
        if len(weights) != len(values):
            raise ProblemError(
                f"weights and values must have the same length, got {len(weights)} weights and "
                f"{len(values)} values: give one value per weight"
            )
        (capacity,) = _integers("capacity", (self.capacity,), scalar=True)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "capacity", capacity)

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def total_weight(self) -> int:
        """The weight of all items together."""
        return sum(self.weights)

    @property
    def total_value(self) -> int:
        """The value of all items together."""
        return sum(self.values)

    def weight_of(self, items: Iterable[int]) -> int:
        """The weight of the items at the given indices."""
        return sum(map(self.weights.__getitem__, items))

    def value_of(self, items: Iterable[int]) -> int:
        """The value of the items at the given indices."""
        return sum(map(self.values.__getitem__, items))


def as_integer(number: object) -> int | None:
    """Return a true integer, NumPy's included, as an ``int``; None for anything else, bools too."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def _integers(name: str, numbers: object, *, scalar: bool = False) -> tuple[int, ...]:
    if not isinstance(numbers, Iterable) or isinstance(numbers, (str, bytes, set, frozenset, dict)):
        raise ProblemError(
            f"{name} must be an ordered sequence of integers, got {type(numbers).__name__}: "
            f"give a tuple or a list"
        )
    items = tuple(numbers)
    if not set(map(type, items)) <= {int}:  # the loop below costs ten times as much
        items = tuple(_integer(_place(name, i, scalar), item) for i, item in enumerate(items))
    if items and (min(items) < 0 or max(items) > INT64_MAX):
        i, bad = next((i, x) for i, x in enumerate(items) if not 0 <= x <= INT64_MAX)
        raise ProblemError(f"{_place(name, i, scalar)} must be from 0 to 2**63 - 1, got {bad}")
    total = sum(items)
    if total > INT64_MAX:
        raise ProblemError(f"{name} must sum to at most 2**63 - 1, got {total}: use a coarser unit")
    return items


def _integer(place: str, item: object) -> int:
    integer = as_integer(item)
    if integer is None:
        raise ProblemError(
            f"{place} must be an integer, got {item!r} ({type(item).__name__}): "
            f"convert or scale it first"
        )
    return integer


def _place(name: str, index: int, scalar: bool) -> str:
    return name if scalar else f"{name}[{index}]"
