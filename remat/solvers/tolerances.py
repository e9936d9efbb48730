"""Knapsacks for solvers that compute in floating point: scaled for them, repaired and bounded in integers.

A solver that takes a row as met within a millionth may return a choice that is one byte too heavy: the
least efficient items are dropped until the rest fits. Its bound counts only as far as doubles justify.

Numbers that are too large are counted more coarsely: weights and the capacity rounded down, values up.
What fits the real problem fits the coarse one and is worth no less there, so its bounds hold. At weights
of a billion CBC was seen to call choices optimal at half the value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from remat.solvers.bounds import relax, repair
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import CoreSolver
from remat.solvers.solution import Answer

_WEIGHT_LIMIT = 10**8
_RELATIVE_TRUST = 1e-6  # HiGHS's bounds were seen 1e-7 too low


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a solver with tolerances makes of a problem.

    Attributes:
        picked: the items that it chose.
        upper: its upper bound on the value; infinity if it has none.
    """

    picked: tuple[int, ...]
    upper: float


class ToleranceSolver(CoreSolver):
    """A solver with tolerances: give it ``attempt``.

    Attributes:
        value_limit: the largest sum of values that it can hold.
    """

    __slots__ = ()

    value_limit: ClassVar[int] = 2**53

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Solve once, and repair the result to an answer within the capacity."""
        scaled, value_unit = scale_down(
            core, weight_limit=_WEIGHT_LIMIT, value_limit=self.value_limit
        )
        relaxed, attempt = relax(core), self.attempt(scaled, time_limit)
        bound = relaxed.bound
        if math.isfinite(attempt.upper):  # no sharper than a bound in doubles justifies
            margin = max(0.5, abs(attempt.upper) * _RELATIVE_TRUST)
            bound = min(bound, value_unit * math.floor(attempt.upper + margin))
        saved = max(relaxed.saved, repair(core, attempt.picked), key=core.value_of)
        value = core.value_of(saved)
        return Answer(saved, max(bound, value), by_clock=bound > value and time_limit is not None)

    def attempt(self, problem: KnapsackProblem, time_limit: float | None) -> Attempt:
        """Solve a problem to a gap of zero, or to a limit; the picks may exceed the capacity slightly."""
        raise NotImplementedError


def scale_down(
    problem: KnapsackProblem, *, weight_limit: int, value_limit: int
) -> tuple[KnapsackProblem, int]:
    """Count more coarsely until the sums of weights and of values stay within the limits.

    Returns:
        The same items in coarser units, and what one unit of value there is worth.
    """
    weight_unit = -(-max(problem.total_weight, 1) // weight_limit)
    value_unit = -(-max(problem.total_value, 1) // max(1, value_limit - len(problem)))
    scaled = KnapsackProblem(
        weights=tuple(w // weight_unit for w in problem.weights),
        values=tuple(-(-v // value_unit) for v in problem.values),
        capacity=problem.capacity // weight_unit,
    )
    return scaled, value_unit
