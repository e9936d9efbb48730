"""Linear relaxation of a knapsack: a feasible choice and a proven upper bound from one sort.

The compiled kernel computes exactly the same result about ten times as fast. The Python code here
defines that result, and runs if remat was installed without a compiler.

Source: G. B. Dantzig, "Discrete-variable extremum problems", Operations Research 5 (1957).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.solvers.kernel import kernel

if TYPE_CHECKING:  # `problem` imports this module, so an import at run time would be circular
    from remat.solvers.problem import KnapsackProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """Result of the linear relaxation of a knapsack, with the better of two greedy choices.

    One greedy choice takes the items by value per weight. The other one takes the most valuable
    item first, then the rest by value per weight.

    Attributes:
        order: indices of the items that weigh at most the capacity, sorted by value per weight,
            best first; ties by index.
        bound: upper bound on the value of any choice that fits the capacity.
        saved: sorted item indices of the better greedy choice. It fits and has at least half the
            optimal value.
        value: total value of ``saved``.
    """

    order: tuple[int, ...]
    bound: int
    saved: tuple[int, ...]
    value: int


def efficiency_order(problem: KnapsackProblem) -> tuple[int, ...]:
    """Return the item indices sorted by value per weight, best first; ties by index.

    Ratios are compared exactly. Items of weight 0 come first.
    """
    weights, values = problem.weights, problem.values
    # Sort by integer quotients, because float division could confuse close ratios. Two distinct
    # fractions with denominators below 2**k differ by more than 2**-2k. So their floors differ after
    # a shift by 2k bits, and equal fractions stay equal.
    shift = 2 * max(weights, default=0).bit_length()
    top = 1 << (shift + 64)  # above every quotient, so items of weight 0 come first
    keys = [-((v << shift) // w) if w else -top for w, v in zip(weights, values, strict=True)]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def fill(problem: KnapsackProblem, order: Iterable[int], room: int) -> list[int]:
    """Go through items in the given order, and take each one that fits into the room still left.

    Args:
        problem: the knapsack.
        order: indices of the items.
        room: total weight that the taken items may have.

    Returns:
        The indices of the taken items, in the given order.
    """
    weights, taken = problem.weights, []
    for i in order:
        if weights[i] <= room:
            room -= weights[i]
            taken.append(i)
    return taken


def repair(problem: KnapsackProblem, picked: Iterable[int]) -> tuple[int, ...]:
    """Make a choice of items fit the capacity, and fill the remaining capacity greedily.

    The items of ``picked`` are taken by value per weight, best first; an item that no longer fits
    is dropped. The remaining capacity is filled in the same way with items outside ``picked``.

    Returns:
        The sorted indices of the items taken.
    """
    order = efficiency_order(problem)
    chosen = set(picked)
    kept = fill(problem, (i for i in order if i in chosen), problem.capacity)
    room = problem.capacity - problem.weight_of(kept)
    added = fill(problem, (i for i in order if i not in chosen), room)
    return tuple(sorted((*kept, *added)))


def relax(problem: KnapsackProblem) -> Relaxation:
    """Compute the linear relaxation's upper bound in integers, and a greedy choice that fits."""
    compiled = kernel()
    if compiled is None:
        return relax_in_python(problem)
    order, bound, saved, value = compiled.relax(problem.weights, problem.values, problem.capacity)
    return Relaxation(order=tuple(order), bound=bound, saved=tuple(saved), value=value)


def relax_in_python(problem: KnapsackProblem) -> Relaxation:
    """Compute the same result as `relax` without the compiled kernel."""
    weights, values, capacity = problem.weights, problem.values, problem.capacity
    order = tuple(i for i in efficiency_order(problem) if weights[i] <= capacity)
    bound, room = 0, capacity
    for i in order:
        if weights[i] > room:
            bound += values[i] * room // weights[i]
            break
        room -= weights[i]
        bound += values[i]
    picked = fill(problem, order, capacity)
    # The greedy choice alone may be arbitrarily bad. The better of this choice and the most valuable
    # item has at least half the optimal value.
    if max((values[i] for i in order), default=0) > problem.value_of(picked):
        best = max(order, key=lambda i: (values[i], -weights[i], -i))
        picked = [best, *fill(problem, (i for i in order if i != best), capacity - weights[best])]
    saved = tuple(sorted(picked))
    return Relaxation(order=order, bound=bound, saved=saved, value=problem.value_of(saved))
