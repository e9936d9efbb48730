"""Making a solver with tolerances meet an integer capacity, round by round.

To a solver that takes a row as met within a millionth, a choice that is one byte too heavy fits. Its
answer then says nothing about the best choice that does fit. So a choice that is too heavy is
answered with a cover cut, which says in coefficients of one that these items do not fit together,
and the solver is asked again. Large weights are counted more coarsely, rounded down, for the same
cuts to sort out: at weights of a billion CBC was seen to call choices optimal at half the value.

Source: E. Balas, "Facets of the knapsack polytope", Mathematical Programming 8 (1975).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat.solvers.bounds import relax
from remat.solvers.problem import KnapsackProblem
from remat.solvers.scaling import Scaled, repair, scale_down
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
        upper: its upper bound on the value of the scaled problem; infinity if it has none.
        finished: no limit ended its search.
    """

    picked: tuple[int, ...]
    upper: float
    finished: bool


def rounds(
    core: KnapsackProblem,
    attempt: Callable[[KnapsackProblem, Sequence[Cover], float | None], Attempt],
    *,
    value_limit: int,
    time_limit: float | None,
) -> Answer:
    """Ask a solver until its choice fits, and make an answer of it that does.

    Args:
        core: what to solve.
        attempt: asks the solver, given a problem, cover cuts and the seconds left.
        value_limit: the largest sum of values that the solver can hold.
        time_limit: seconds in all, or None.
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    scaled = scale_down(core, weight_limit=_WEIGHT_LIMIT, value_limit=value_limit)
    relaxed = relax(core)
    saved, bound, covers = relaxed.saved, relaxed.bound, list[Cover]()
    left = time_limit
    for _ in range(_ROUNDS):
        tried = attempt(scaled.problem, covers, left)
        bound = min(bound, _trusted(scaled, tried.upper))
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


def _trusted(scaled: Scaled, upper: float) -> int:
    """An integer bound, no sharper than a float one justifies."""
    if not math.isfinite(upper):
        return 2**63
    return scaled.value_unit * math.floor(upper + max(0.5, abs(upper) * _RELATIVE_TRUST))
