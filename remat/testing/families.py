"""Draw random knapsacks from families; a family is a rule by which weights and values of items are drawn.

`family` returns the same knapsack for the same arguments on every machine.

The families are those of Pisinger, "Where are the hard knapsack problems?", Computers & Operations Research 32 (2005).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from remat.solvers.problem import KnapsackProblem

#: A function that draws a uniform integer between two bounds, both included.
Draw = Callable[[int, int], int]
#: Weights and values of all items.
Items = tuple[list[int], list[int]]
#: A function that draws items. Arguments: the number of items, the largest weight or value, and a `Draw`.
Family = Callable[[int, int, Draw], Items]

_MULTIPLES = 10  # largest multiple of a base item in a spanner family
_BASE_ITEMS = 2


def _valued(value: Callable[[int, int, Draw], int]) -> Family:
    """Return a family of random knapsacks with values that ``value(weight, span, draw)`` computes."""

    def items(count: int, span: int, draw: Draw) -> Items:
        weights = [draw(1, span) for _ in range(count)]
        return weights, [value(weight, span, draw) for weight in weights]

    return items


def _inverse_strongly_correlated(count: int, span: int, draw: Draw) -> Items:
    values = [draw(1, span) for _ in range(count)]
    return [value + span // 10 for value in values], values


def _similar_weights(count: int, _: int, draw: Draw) -> Items:
    weights = [draw(100_000, 100_100) for _ in range(count)]
    return weights, [draw(1, 1_000) for _ in range(count)]


def _spanner(base: Family) -> Family:
    """Return a family of knapsacks whose items are random multiples of two items from the family ``base``."""

    def items(count: int, span: int, draw: Draw) -> Items:
        # Divided by 11 and rounded up, as in the source, so that the multiples keep to the span.
        weights, values = (
            [-(-number // (_MULTIPLES + 1)) for number in numbers]
            for numbers in base(_BASE_ITEMS, span, draw)
        )
        picks = [(draw(0, _BASE_ITEMS - 1), draw(1, _MULTIPLES)) for _ in range(count)]
        return [weights[i] * by for i, by in picks], [values[i] * by for i, by in picks]

    return items


_uncorrelated = _valued(lambda weight, span, draw: draw(1, span))
_weakly_correlated = _valued(
    lambda weight, span, draw: max(1, draw(weight - span // 10, weight + span // 10))
)
_strongly_correlated = _valued(lambda weight, span, draw: weight + span // 10)

FAMILIES: Mapping[str, Family] = {
    "uncorrelated": _uncorrelated,
    "weakly-correlated": _weakly_correlated,
    "strongly-correlated": _strongly_correlated,
    "subset-sum": _valued(lambda weight, span, draw: weight),
    "inverse-strongly-correlated": _inverse_strongly_correlated,
    "almost-strongly-correlated": _valued(
        lambda weight, span, draw: weight + span // 10 + draw(-(span // 500), span // 500)
    ),
    "similar-weights": _similar_weights,
    "spanner-uncorrelated": _spanner(_uncorrelated),
    "spanner-weakly-correlated": _spanner(_weakly_correlated),
    "spanner-strongly-correlated": _spanner(_strongly_correlated),
    "multiple-strongly-correlated": _valued(
        lambda weight, span, draw: weight + (3 if weight % 6 == 0 else 2) * span // 10
    ),
    "profit-ceiling": _valued(lambda weight, span, draw: 3 * -(-weight // 3)),
    "circle": _valued(
        lambda weight, span, draw: 2 * math.isqrt(4 * span**2 - (weight - 2 * span) ** 2) // 3
    ),
}


def drawer(seed: int) -> Draw:
    """Return a function that draws a uniform integer between two bounds, both included.

    The same seed gives the same integers in every Python release.
    """
    source = random.Random(seed)

    def draw(low: int, high: int) -> int:
        # Python keeps only the sequence of random() in later releases.
        return low + int(source.random() * (high - low + 1))

    return draw


def family(name: str, *, items: int, span: int, share: int, seed: int) -> KnapsackProblem:
    """Draw a random knapsack of the named family.

    Args:
        name: a key of `FAMILIES`.
        items: number of items.
        span: weights are drawn from 1 to this number. For ``inverse-strongly-correlated``, values
            are drawn from this range, and weights are computed from the values. Spanner families
            draw their two base items with ``span``. The family ``similar-weights`` ignores
            ``span``.
        share: the capacity, in parts of 101 of the total weight. For example, 50 means 50/101.
        seed: seed of the random integers.
    """
    weights, values = FAMILIES[name](items, span, drawer(seed))
    return KnapsackProblem(tuple(weights), tuple(values), sum(weights) * share // 101)


def layers(
    *, blocks: int, sizes: tuple[int, ...], costs: tuple[int, ...], share: int
) -> KnapsackProblem:
    """Build the knapsack of a model that repeats one block, with the same items in each block.

    ``share`` is the capacity, in percent of the total weight.
    """
    weights, values = sizes * blocks, costs * blocks
    return KnapsackProblem(weights, values, sum(weights) * share // 100)
