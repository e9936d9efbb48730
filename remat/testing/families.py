"""Families of random knapsacks that are the same on every machine.

Source: D. Pisinger, "Where are the hard knapsack problems?", Computers & Operations Research 32
(2005).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from remat.solvers.problem import KnapsackProblem

Draw = Callable[[int, int], int]
"""A uniform integer between two bounds, both included."""


def _uncorrelated(_: int, span: int, draw: Draw) -> int:
    return draw(1, span)


def _weakly_correlated(weight: int, span: int, draw: Draw) -> int:
    return max(1, draw(weight - span // 10, weight + span // 10))


def _strongly_correlated(weight: int, span: int, _: Draw) -> int:
    return weight + span // 10


def _subset_sum(weight: int, _: int, __: Draw) -> int:
    return weight


FAMILIES: Mapping[str, Callable[[int, int, Draw], int]] = {
    "uncorrelated": _uncorrelated,
    "weakly-correlated": _weakly_correlated,
    "strongly-correlated": _strongly_correlated,
    "subset-sum": _subset_sum,
}


def drawer(seed: int) -> Draw:
    """Return a source of uniform integers; the same for a seed in every release of Python."""
    source = random.Random(seed)

    def draw(low: int, high: int) -> int:
        return low + int(source.random() * (high - low + 1))  # random() is what Python promises

    return draw


def family(name: str, *, items: int, span: int, share: int, seed: int) -> KnapsackProblem:
    """Draw a problem.

    Args:
        name: one of `FAMILIES`.
        items: how many items.
        span: weights are from 1 to this.
        share: the capacity in hundred-and-firsts of the total weight.
        seed: which of the family.
    """
    draw = drawer(seed)
    weights = [draw(1, span) for _ in range(items)]
    values = [FAMILIES[name](weight, span, draw) for weight in weights]
    return KnapsackProblem(tuple(weights), tuple(values), sum(weights) * share // 101)


def layers(
    *, blocks: int, sizes: tuple[int, ...], costs: tuple[int, ...], share: int
) -> KnapsackProblem:
    """A model of identical blocks, as real ones are: the same few items over and over."""
    weights, values = sizes * blocks, costs * blocks
    return KnapsackProblem(weights, values, sum(weights) * share // 100)
