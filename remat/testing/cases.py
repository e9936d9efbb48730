"""Define the cases of the conformance suite of solvers: named problems whose optima are known.

A bug found in one solver becomes a case for all solvers. Published cases never change.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from remat.solvers.knapsack.bounds import efficiency_order
from remat.solvers.problem import KnapsackProblem, Problem
from remat.testing.families import FAMILIES, family, layers
from remat.testing.oracle import optimum
from remat.testing.steps import NAMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named problem whose optimum is known.

    Attributes:
        name: name in kebab-case, shown in test ids and tables.
        problem: the problem to solve.
        certificate: the known optimum; None for a problem that is small enough for enumeration.
    """

    name: str
    problem: Problem[Any]
    certificate: int | None = None

    @property
    def kind(self) -> str:
        """Kind of the case's problem; the case runs only on solvers that solve this kind."""
        return self.problem.kind

    @property
    def optimum(self) -> int:
        """The problem's best value or cost, from the case's certificate or by enumeration."""
        best = optimum(self.problem) if self.certificate is None else self.certificate
        assert best is not None
        return best


_GIB = 2**30
_PETA = 10**15

# name: (weights, values, capacity). At most 20 items, so that the optimum can be enumerated.
_SMALL: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "empty": ((), (), 10),
    "empty-no-room": ((), (), 0),
    "zero-capacity": ((3, 1, 2), (5, 4, 3), 0),
    "zero-capacity-weightless": ((0, 1, 0), (5, 4, 3), 0),
    "all-zero": ((0, 0, 0), (0, 0, 0), 0),
    "worthless": ((3, 1, 2), (0, 0, 0), 4),
    "weightless": ((0, 0, 0), (3, 1, 2), 4),
    "all-fit": ((3, 1, 2), (5, 4, 3), 6),
    "one-item-fits": ((3,), (5,), 3),
    "one-item-too-heavy": ((3,), (5,), 2),
    "all-too-heavy": ((7, 8, 9), (5, 4, 3), 6),
    "equal-items": ((5,) * 9, (7,) * 9, 23),
    "last-unit": ((4, 3, 3), (5, 4, 3), 6),
    "exact-fit": ((6, 5, 4, 3), (60, 51, 42, 31), 13),
    "greedy-trap": ((1, 1000), (2, 1000), 1000),
    "half-trap": ((51, 50, 50), (53, 50, 50), 100),
    "peta-next-to-one": ((_PETA, 1, 1, _PETA, 1), (_PETA, 1, 2, _PETA - 1, 3), _PETA + 2),
    "peta-values": ((3, 4, 5, 6), (_PETA, _PETA + 1, _PETA + 3, _PETA + 2), 9),
    "beyond-doubles": ((2**53 + 1, 2**53, 1, 1), (2**53 + 1, 2**53, 1, 1), 2**53 + 1),
    "int64-edge": ((2**61, 2**61, 2**61 - 1), (2**61 - 1, 2**61, 2**61), 2**62 - 1),
    "gigabytes": (
        (3 * _GIB + 1, 5 * _GIB + 7, 2 * _GIB + 3, 7 * _GIB - 5, _GIB + 11, 4 * _GIB - 9),
        (31_000_000, 52_000_001, 20_999_999, 70_000_003, 11_000_000, 40_500_000),
        12 * _GIB,
    ),
    "gigabytes-one-byte-short": (
        (3 * _GIB, 5 * _GIB, 4 * _GIB, 2 * _GIB + 1),
        (30, 50, 40, 21),
        9 * _GIB - 1,
    ),
    "even-weights-odd-room": ((2, 4, 6, 8, 10, 12, 14), (2, 4, 6, 8, 10, 12, 14), 27),
    "powers-of-two": (
        tuple(2**i for i in range(18)),
        tuple(2**i for i in range(18)),
        2**18 - 12_345,
    ),
    # In floating point, ten times 1/11 is more than 10/11.
    "eleven-equal-room-for-ten": ((7,) * 11, (9,) * 11, 70),
    "thirds": ((1, 1, 1), (5, 4, 3), 2),
    "weightless-among-heavy": ((0, 9, 4, 0, 7), (3, 9, 8, 1, 2), 12),
    "worthless-among-dear": ((2, 3, 4, 1), (0, 7, 8, 0), 5),
    "lighter-of-equal-value": ((5, 4, 6, 3), (10, 10, 10, 10), 7),
    "past-int32": (
        (2**31 + 1, 2**31 - 1, 2**31, 2**32 + 1, 3),
        (2**33, 2**33 + 5, 2**33 + 2, 2**34 + 1, 1),
        2**32 + 2,
    ),
    "byte-next-to-terabyte": ((2**40, 1, 2**40 - 1, 2), (2**41, 1, 2**41, 1), 2**40 + 1),
    "one-more-than-doubles-tell": ((2**53, 1, 1), (50, 4, 3), 2**53),
    "room-beyond-all": ((3, 1, 2), (5, 4, 3), 2**63 - 1),
    "one-item-twice-as-good": ((1, 1, 2), (1, 1, 4), 2),
    # SCIP, CBC and SAT through OR-Tools' linear solver take both; HiGHS through SciPy fails on the second problem.
    "two-items-one-byte-short": ((10**9 + 1,) * 2, (1, 1), 2 * 10**9 + 1),
    "two-terabytes-one-byte-short": ((10**12 + 1,) * 2, (1, 1), 2 * 10**12 + 1),
    "ascending-efficiency": (tuple(range(1, 15)), tuple(i * i for i in range(1, 15)), 50),
}

# (family, items, span, share, seed) as in `family`: optimum.
_LARGE: dict[tuple[str, int, int, int, int], int] = {
    # These optima were computed by dynamic programming over capacity.
    ("uncorrelated", 50, 1000, 30, 1): 17_533,
    ("weakly-correlated", 50, 1000, 50, 2): 15_011,
    ("strongly-correlated", 50, 1000, 50, 3): 16_614,
    ("subset-sum", 50, 1000, 40, 4): 9_810,
    ("uncorrelated", 300, 1000, 50, 5): 113_852,
    ("weakly-correlated", 300, 1000, 20, 6): 35_313,
    ("strongly-correlated", 200, 1000, 33, 7): 42_481,
    ("subset-sum", 100, 10_000, 5, 8): 22_784,
    # These optima were computed by dynamic programming over items, with undominated (weight, value) pairs.
    ("inverse-strongly-correlated", 50, 1000, 40, 11): 10_808,
    ("almost-strongly-correlated", 60, 1000, 60, 12): 21_301,
    ("similar-weights", 60, 1000, 50, 13): 21_356,
    ("spanner-strongly-correlated", 80, 1000, 50, 14): 9_814,
    ("multiple-strongly-correlated", 60, 1000, 40, 15): 21_307,
    ("profit-ceiling", 60, 1000, 50, 16): 13_998,
    ("circle", 60, 1000, 50, 17): 30_557,
}


def _drawn_small() -> list[Case]:
    """Build random knapsacks of twelve items: one for each combination of a family and one of three capacities."""
    return [
        Case(
            name=f"{name}-12-at-{share}",
            problem=family(name, items=12, span=100, share=share, seed=share),
        )
        for name in FAMILIES
        for share in (10, 50, 90)
    ]


def _drawn_large() -> list[Case]:
    return [
        Case(
            name=f"{name}-{items}-to-{span}-at-{share}",
            problem=family(name, items=items, span=span, share=share, seed=seed),
            certificate=best,
        )
        for (name, items, span, share, seed), best in _LARGE.items()
    ]


def _like_models() -> list[Case]:
    """Build knapsacks of hundreds and thousands of items, similar to those of real models."""
    values = tuple(10_000 + 7_919 * i % 3_001 for i in range(3_000))
    sizes = tuple(4 * 2**20 + 512 * (37 * i % 101) for i in range(240))
    worth_it = range(0, 240, 3)
    costs = tuple((6 if i in worth_it else 3) * size for i, size in enumerate(sizes))
    mib = 2**20
    return [
        # The weights are equal, so the optimum is the 2,222 most valuable items. A solver that rounds weights
        # to the nearest of 10,000 steps takes too many items.
        Case(
            name="3000-equal-weights",
            problem=KnapsackProblem((27,) * 3_000, values, 60_003),
            certificate=sum(sorted(values, reverse=True)[: 60_003 // 27]),
        ),
        # The tensors with the better ratio of cost to size fill the capacity exactly. Their cost equals the
        # bound of the linear relaxation, so it is optimal.
        Case(
            name="240-tensors-exact-fill",
            problem=KnapsackProblem(sizes, costs, sum(sizes[i] for i in worth_it)),
            certificate=sum(costs[i] for i in worth_it),
        ),
        # The certificate comes from dynamic programming over capacity, in units of 1 MiB.
        Case(
            name="32-identical-layers",
            problem=layers(
                blocks=32,
                sizes=(16 * mib, 24 * mib, 56 * mib, 41 * mib, 16 * mib),
                costs=(700_000, 911_000, 2_310_000, 1_730_000, 688_000),
                share=37,
            ),
            certificate=77_532_000,
        ),
    ]


def _twenty_thousand() -> list[Case]:
    """Build knapsacks of 20,000 items whose optimum is known by construction."""
    # The items with the most value per weight fill the capacity exactly. Their value equals the bound of the linear
    # relaxation, so it is optimal.
    random_items = family("uncorrelated", items=20_000, span=10**7, share=101, seed=21)
    best = efficiency_order(random_items.weights, random_items.values)[:8_000]
    mib = 2**20
    sizes, costs = (16 * mib, 24 * mib, 56 * mib, 41 * mib), (700, 911, 2_800, 1_730)
    blocks = 5_000
    return [
        Case(
            name="20000-items",
            problem=KnapsackProblem(
                random_items.weights, random_items.values, random_items.weight_of(best)
            ),
            certificate=random_items.value_of(best),
        ),
        # 2,800 / 56 is the best ratio and 700 / 16 the second best. All items of 56 MiB fit, and 1,234 of
        # 16 MiB.
        Case(
            name="20000-items-of-four-kinds",
            problem=KnapsackProblem(
                sizes * blocks, costs * blocks, blocks * sizes[2] + 1_234 * sizes[0]
            ),
            certificate=blocks * costs[2] + 1_234 * costs[0],
        ),
    ]


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return all cases of the suite, in a fixed order."""
    return (
        *(Case(name=name, problem=KnapsackProblem(*small)) for name, small in _SMALL.items()),
        *_drawn_small(),
        *_drawn_large(),
        *_like_models(),
        *_twenty_thousand(),
        *(Case(name=name, problem=step) for name, step in NAMED.items()),
    )
