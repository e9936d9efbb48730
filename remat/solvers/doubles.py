"""What solvers that compute in floating point need: a safe way in, and a way out that fits.

Scaling rounds weights up and the capacity down, so a choice that fits the scaled problem fits the
real one. What comes back from a solver with tolerances may still be overweight by a little, or have
lost an item to them; `repair` drops and fills in integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat.solvers.bounds import efficiency_order, fill
from remat.solvers.problem import KnapsackProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A problem whose numbers a solver can hold.

    Attributes:
        problem: the same items, weights rounded up, capacity down.
        exact: nothing was rounded, so bounds hold for the real problem too.
    """

    problem: KnapsackProblem
    exact: bool


def coarsen(problem: KnapsackProblem, unit: int) -> KnapsackProblem:
    """Count weights in multiples of ``unit``: rounded up, and the capacity down."""
    return KnapsackProblem(
        weights=tuple(-(-w // unit) for w in problem.weights),
        values=problem.values,
        capacity=problem.capacity // unit,
    )


def scale_down(problem: KnapsackProblem, limit: int) -> Scaled:
    """Shrink a problem until the sums of its weights and of its values stay within ``limit``."""
    scaled, exact = problem, True
    if problem.total_weight > limit:
        scaled, exact = coarsen(problem, _unit(problem.total_weight, len(problem), limit)), False
    if problem.total_value > limit:
        unit, exact = _unit(problem.total_value, len(problem), limit), False
        values = tuple(-(-v // unit) for v in problem.values)
        scaled = KnapsackProblem(weights=scaled.weights, values=values, capacity=scaled.capacity)
    return Scaled(problem=scaled, exact=exact)


def repair(problem: KnapsackProblem, picked: Iterable[int]) -> tuple[int, ...]:
    """Drop the least efficient picks until the rest fits, then fill up; in integers, sorted."""
    order = efficiency_order(problem)
    chosen = set(picked)
    kept = fill(problem, (i for i in order if i in chosen), problem.capacity)
    room = problem.capacity - problem.weight_of(kept)
    added = fill(problem, (i for i in order if i not in chosen), room)
    return tuple(sorted((*kept, *added)))


def _unit(total: int, count: int, limit: int) -> int:
    """The least unit in which ``count`` numbers of that total, each rounded up, stay in limit."""
    return -(-total // max(1, limit - count))
