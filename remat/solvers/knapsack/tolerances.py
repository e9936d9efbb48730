"""Run floating-point solvers on scaled knapsacks, and repair and bound their answers in integers.

A solver that accepts a constraint within a millionth may return a choice that is one byte too
heavy. Items of a choice that is too heavy are dropped, those with the least value per weight first. The
solver's bound is raised by the possible rounding error before it is used.

Large weights and values are scaled down: weights and the capacity are rounded down, values up. A choice that fits the
original problem also fits the scaled problem, where its value is no lower. The upper bound for the scaled problem
therefore also holds for the original problem. Without scaling, CBC reported choices of half the optimal value as
optimal on items with weights of a billion.
"""

from __future__ import annotations

import math
from typing import ClassVar

from remat.solvers.knapsack.reduction import CoreSolver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.solution import Answer

_WEIGHT_LIMIT = 10**8  # well below the weights of a billion in the module's docstring
_RELATIVE_TRUST = 1e-6  # fraction added to an upper bound; HiGHS's bounds were seen 1e-7 too low


class ToleranceSolver(CoreSolver):
    """Base class of knapsack solvers in floating point; a subclass defines ``attempt``.

    Attributes:
        value_limit: the largest sum of values that the solver can represent.
    """

    __slots__ = ()

    value_limit: ClassVar[int] = 2**53

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Run ``attempt`` once on the scaled undecided items, and repair the choice so that it fits the capacity."""
        scaled, value_unit = scale_down(
            core, weight_limit=_WEIGHT_LIMIT, value_limit=self.value_limit
        )
        relaxed, (picked, upper) = core.relaxed(), self.attempt(scaled, time_limit)
        bound = relaxed.bound
        if math.isfinite(upper):  # raise the bound by the possible rounding error
            margin = max(0.5, abs(upper) * _RELATIVE_TRUST)
            bound = min(bound, value_unit * math.floor(upper + margin))
        saved = max(relaxed.saved, core.repaired(picked), key=core.value_of)
        value = core.value_of(saved)
        return Answer(saved, max(bound, value), by_clock=bound > value and time_limit is not None)

    def attempt(
        self, problem: KnapsackProblem, time_limit: float | None
    ) -> tuple[tuple[int, ...], float]:
        """Solve a scaled knapsack to proven optimality, or until a limit on time or search nodes.

        Returns the picked items, which may exceed the capacity slightly, and an upper bound, which may be infinite.
        """
        raise NotImplementedError


def scale_down(
    problem: KnapsackProblem, *, weight_limit: int, value_limit: int
) -> tuple[KnapsackProblem, int]:
    """Divide the numbers of a knapsack so that the sums of weights and values stay within limits.

    Returns a knapsack of the same items in coarser units, and how many original units of value make one
    coarse unit.
    """
    weight_unit = -(-max(problem.total_weight, 1) // weight_limit)
    value_unit = -(-max(problem.total_value, 1) // max(1, value_limit - len(problem)))
    scaled = KnapsackProblem(
        weights=tuple(w // weight_unit for w in problem.weights),
        values=tuple(-(-v // value_unit) for v in problem.values),
        capacity=problem.capacity // weight_unit,
    )
    return scaled, value_unit
