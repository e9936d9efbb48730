"""Making a solver with tolerances meet an integer capacity, round by round.

A solver that takes a row as met within a millionth may return a choice that is one byte too heavy, and
then says nothing about the best choice that fits. So such a choice gets a cover cut, which states in
coefficients of one that these items do not fit together, and the solver is asked again.

Numbers that are too large are counted more coarsely: weights and the capacity rounded down, values up.
What fits the real problem fits the coarse one and is worth no less there, so its bounds hold; a choice
that is too heavy is cut off. At weights of a billion CBC was seen to call choices optimal at half the
value.

Source: E. Balas, "Facets of the knapsack polytope", Mathematical Programming 8 (1975).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.solvers.bounds import relax, repair
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import CoreSolver
from remat.solvers.solution import Answer

_ROUNDS = 8
_WEIGHT_LIMIT = 10**8
_RELATIVE_TRUST = 1e-6  # HiGHS's bounds were seen 1e-7 too low


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """Of these items, at most ``most`` fit together."""

    items: tuple[int, ...]
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a solver with tolerances makes of a problem.

    Attributes:
        picked: the items that it chose.
        upper: its upper bound on the value; infinity if it has none.
        finished: no limit ended its search.
    """

    picked: tuple[int, ...]
    upper: float
    finished: bool


class ToleranceSolver(CoreSolver):
    """A solver with tolerances, asked until its choice fits: give it ``attempt``.

    Attributes:
        value_limit: the largest sum of values that it can hold.
    """

    __slots__ = ()

    value_limit: ClassVar[int] = 2**53

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Ask in rounds, each with one more cut, and make an answer that fits of what comes back."""
        deadline = None if time_limit is None else time.monotonic() + time_limit
        scaled, value_unit = scale_down(
            core, weight_limit=_WEIGHT_LIMIT, value_limit=self.value_limit
        )
        relaxed = relax(core)
        saved, bound, covers = relaxed.saved, relaxed.bound, list[Cover]()
        left = time_limit
        for _ in range(_ROUNDS):
            tried = self.attempt(scaled, covers, left)
            if math.isfinite(tried.upper):  # no sharper than a bound in doubles justifies
                margin = max(0.5, abs(tried.upper) * _RELATIVE_TRUST)
                bound = min(bound, value_unit * math.floor(tried.upper + margin))
            found = repair(core, tried.picked)
            saved = max(saved, found, key=core.value_of)
            fits = core.weight_of(tried.picked) <= core.capacity
            if fits or core.value_of(saved) == bound or not tried.finished:
                break
            covers.append(cover(core, tried.picked))
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
        bound = max(bound, core.value_of(saved))
        unproven = bound > core.value_of(saved)
        return Answer(saved, bound, by_clock=unproven and time_limit is not None)

    def attempt(
        self, problem: KnapsackProblem, covers: Sequence[Cover], time_limit: float | None
    ) -> Attempt:
        """Solve a problem to a gap of zero, or to a limit; what it picks may be a little too heavy."""
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


def cover(problem: KnapsackProblem, picked: Sequence[int]) -> Cover:
    """Cut off a choice that is too heavy, and what is at least as heavy in the same way."""
    weights, heavy, weight = problem.weights, [], 0
    for i in sorted(picked, key=lambda i: (-weights[i], i)):
        heavy.append(i)
        weight += weights[i]
        if weight > problem.capacity:
            break
    most = len(heavy) - 1
    extended = {*heavy, *(i for i, w in enumerate(weights) if w >= weights[heavy[0]])}
    return Cover(items=tuple(sorted(extended)), most=most)
