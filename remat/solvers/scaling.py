"""What solvers that compute in floating point need: numbers they can hold, and a way back.

Numbers that are too large are counted more coarsely, weights and the capacity rounded down, values up:
whatever fits the real problem fits the coarse one and is worth no less there, so its bounds hold. What
comes back may be overweight; `repair` drops and fills in integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat.solvers.bounds import efficiency_order, fill
from remat.solvers.problem import KnapsackProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A relaxation of a problem in numbers that a solver can hold.

    Attributes:
        problem: the same items, weights rounded down, values up.
        value_unit: what one unit of value in it is worth.
    """

    problem: KnapsackProblem
    value_unit: int


def scale_down(problem: KnapsackProblem, *, weight_limit: int, value_limit: int) -> Scaled:
    """Count more coarsely until the sums of weights and of values stay within the limits."""
    weight_unit = -(-max(problem.total_weight, 1) // weight_limit)
    value_unit = -(-max(problem.total_value, 1) // max(1, value_limit - len(problem)))
    scaled = KnapsackProblem(
        weights=tuple(w // weight_unit for w in problem.weights),
        values=tuple(-(-v // value_unit) for v in problem.values),
        capacity=problem.capacity // weight_unit,
    )
    return Scaled(problem=scaled, value_unit=value_unit)


def repair(problem: KnapsackProblem, picked: Iterable[int]) -> tuple[int, ...]:
    """Drop the least efficient picks until the rest fits, then fill up; in integers, sorted."""
    order = efficiency_order(problem)
    chosen = set(picked)
    kept = fill(problem, (i for i in order if i in chosen), problem.capacity)
    room = problem.capacity - problem.weight_of(kept)
    added = fill(problem, (i for i in order if i not in chosen), room)
    return tuple(sorted((*kept, *added)))
