"""Compute a knapsack's linear relaxation by one sort of the items; it gives a choice that fits and a proven bound.

The method is that of Dantzig, "Discrete-variable extremum problems", Operations Research 5 (1957).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """Result of the linear relaxation of a knapsack, with the better of two greedy choices.

    One greedy choice takes the items by value per weight. The other greedy choice takes the most valuable
    item first, then the remaining items by value per weight.

    Attributes:
        order: the items that weigh at most the capacity, best value per weight first; ties by index.
        bound: upper bound on the value of any choice that fits the capacity.
        saved: sorted items of the better greedy choice, which has at least half the optimal value.
        value: total value of ``saved``.
    """

    order: tuple[int, ...]
    bound: int
    saved: tuple[int, ...]
    value: int


def efficiency_order(weights: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Return the item indices sorted by exact value per weight, best first, and then by index."""
    # Sort by integer quotients, because float division could confuse close ratios. Two distinct
    # fractions with denominators below 2**k differ by more than 2**-2k. So their floors differ after
    # a shift by 2k bits, and equal fractions stay equal.
    shift = 2 * max(weights, default=0).bit_length()
    top = 1 << (shift + 64)  # above every quotient, so items of weight 0 come first
    keys = [-((v << shift) // w) if w else -top for w, v in zip(weights, values, strict=True)]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def fill(weights: Sequence[int], order: Iterable[int], room: int) -> list[int]:
    """Take items in the given order, skip each item that no longer fits into ``room``, and return the taken items."""
    taken = []
    for i in order:
        if weights[i] <= room:
            room -= weights[i]
            taken.append(i)
    return taken


def repair(
    weights: Sequence[int], values: Sequence[int], capacity: int, picked: Iterable[int]
) -> tuple[int, ...]:
    """Take the picked items by value per weight, then the others, skip those that do not fit, and sort the result."""
    order, chosen = efficiency_order(weights, values), set(picked)
    # A stable sort puts the chosen items first, and leaves each part in order of value per weight.
    return tuple(sorted(fill(weights, sorted(order, key=lambda i: i not in chosen), capacity)))


def relax(weights: Sequence[int], values: Sequence[int], capacity: int) -> Relaxation:
    """Compute the linear relaxation's upper bound in integers, and a greedy choice within the capacity."""
    order = tuple([i for i in efficiency_order(weights, values) if weights[i] <= capacity])
    bound, room = 0, capacity
    for i in order:
        if weights[i] > room:
            bound += values[i] * room // weights[i]
            break
        room -= weights[i]
        bound += values[i]
    picked = fill(weights, order, capacity)
    # The greedy choice alone may be arbitrarily bad. The better of this choice and the most valuable
    # item has at least half the optimal value.
    value = values.__getitem__
    if max(map(value, order), default=0) > sum(map(value, picked)):
        best = max(order, key=lambda i: (values[i], -weights[i], -i))
        rest = (i for i in order if i != best)
        picked = [best, *fill(weights, rest, capacity - weights[best])]
    saved = tuple(sorted(picked))
    return Relaxation(order=order, bound=bound, saved=saved, value=sum(map(value, saved)))
