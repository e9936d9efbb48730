"""The linear relaxation of a knapsack: a good answer and a proven upper bound for one sort.

The compiled kernel computes the same, item for item, about ten times as fast; the Python here defines
it, and runs where there was no compiler.

Source: G. B. Dantzig, "Discrete-variable extremum problems", Operations Research 5 (1957).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.solvers.kernel import kernel

if TYPE_CHECKING:  # problems know their bounds
    from remat.solvers.problem import KnapsackProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The linear relaxation of a knapsack and the best of two simple roundings of it.

    Attributes:
        order: the items that fit on their own, by value per weight, best first; ties by index.
        bound: no choice of items is worth more.
        saved: a feasible choice, worth at least half the best; sorted.
        value: what ``saved`` is worth.
    """

    order: tuple[int, ...]
    bound: int
    saved: tuple[int, ...]
    value: int


def efficiency_order(problem: KnapsackProblem) -> tuple[int, ...]:
    """Return the items by value per weight, best first, compared exactly; ties by index."""
    weights, values = problem.weights, problem.values
    # Two distinct fractions with denominators below 2**k differ by more than 2**-2k, so their
    # floors differ after a shift by 2k bits, and equal fractions stay equal.
    shift = 2 * max(weights, default=0).bit_length()
    top = 1 << (shift + 64)  # above every quotient: what weighs nothing comes first
    keys = [-((v << shift) // w) if w else -top for w, v in zip(weights, values, strict=True)]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def fill(problem: KnapsackProblem, order: Iterable[int], room: int) -> list[int]:
    """Return the items of ``order``, taken one after the other, that still fit into ``room``."""
    weights, taken = problem.weights, []
    for i in order:
        if weights[i] <= room:
            room -= weights[i]
            taken.append(i)
    return taken


def repair(problem: KnapsackProblem, picked: Iterable[int]) -> tuple[int, ...]:
    """Drop the least efficient picks until the rest fits, then fill up; in integers, sorted."""
    order = efficiency_order(problem)
    chosen = set(picked)
    kept = fill(problem, (i for i in order if i in chosen), problem.capacity)
    room = problem.capacity - problem.weight_of(kept)
    added = fill(problem, (i for i in order if i not in chosen), room)
    return tuple(sorted((*kept, *added)))


def relax(problem: KnapsackProblem) -> Relaxation:
    """Solve the linear relaxation exactly and round it greedily."""
    compiled = kernel()
    if compiled is None:
        return relax_in_python(problem)
    order, bound, saved, value = compiled.relax(problem.weights, problem.values, problem.capacity)
    return Relaxation(order=tuple(order), bound=bound, saved=tuple(saved), value=value)


def relax_in_python(problem: KnapsackProblem) -> Relaxation:
    """`relax` without the kernel."""
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
    if max((values[i] for i in order), default=0) > problem.value_of(picked):
        best = max(order, key=lambda i: (values[i], -weights[i], -i))
        picked = [best, *fill(problem, (i for i in order if i != best), capacity - weights[best])]
    saved = tuple(sorted(picked))
    return Relaxation(order=order, bound=bound, saved=saved, value=problem.value_of(saved))
