"""Adapt remat's solvers to the function signature of PyTorch's knapsack solvers, which take floats.

The signature is ``(memory, runtimes, max_memory) -> (total runtime saved, indices to save, indices
to allow recomputing)``, as in ``torch/_functorch/_activation_checkpointing/knapsack.py``. This
module differs from PyTorch's functions in two points.

First, a float counts as the decimal that Python prints for it, so three items of 0.1 fit into a capacity of 0.3. The
decimals are scaled to integers. Scaling is exact if the sum of the integers fits into 63 bits. If the sum does not fit,
the scaled decimals are rounded so that the choice still fits the capacity.

Second, PyTorch divides each item's memory by a total, and the quotient is rounded. A sum of quotients may therefore
exceed the capacity by the rounding error. To allow for the rounding error, an item of 0.5000000000000001 fits into a
capacity of 0.5 (see `TOLERANCE`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from remat.errors import ProblemError
from remat.solvers.base import Solver
from remat.solvers.columns import INT64_MAX, as_integer
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run

KnapsackFn = Callable[[Sequence[float], Sequence[float], float], tuple[float, list[int], list[int]]]
#: Fraction by which a sum of weights may exceed the capacity: 8 · 2^-53, where 2^-53 is the rounding
#: error of one operation on doubles. PyTorch computes a weight with about five such errors: a size
#: divided by 10^9 and by a difference of sums. The tolerance is less than one byte as long as the
#: total is below 2^50 bytes.
TOLERANCE = Fraction(1, 2**50)
#: Largest sum of rounded weights, and of rounded values. With the limit on weights, a unit of weight is less than
#: a byte for totals below 2^60 bytes. With the limit on values, sums of values are exact in a double.
_COARSE_WEIGHTS, _COARSE_VALUES = 2**60, 2**53 - 1


def knapsack_fn(solver: Solver) -> KnapsackFn:
    """Wrap a solver as a function with the signature of PyTorch's knapsack solvers.

    Args:
        solver: the solver to run.

    Returns:
        A function of ``memory`` (per item, any unit), ``runtimes`` (per item, any unit) and
        ``max_memory`` (the unit of ``memory``). The function returns the total runtime of the saved
        items, the sorted indices of the saved items, and those of all other items. The function
        raises `ProblemError` if a number is invalid, infinite or negative, and `SolverError` if the
        solver fails.
    """

    def solve(
        memory: Sequence[float], runtimes: Sequence[float], max_memory: float
    ) -> tuple[float, list[int], list[int]]:
        saved = run(solver, problem_from_floats(memory, runtimes, max_memory)).saved
        chosen = set(saved)
        others = [i for i in range(len(memory)) if i not in chosen]
        return math.fsum(float(runtimes[i]) for i in saved), list(saved), others

    return solve


def problem_from_floats(
    memory: Iterable[float], runtimes: Iterable[float], max_memory: float
) -> KnapsackProblem:
    """Convert floats to a knapsack problem in integers.

    Memory is scaled by one factor, and runtimes by another. If the exact integers of memory or runtimes would sum to
    more than 63 bits, memory and runtimes are rounded up and the capacity down.

    Raises:
        ProblemError: a number is invalid, infinite or negative, or the lengths differ.
    """
    weights = [_decimal(f"memory[{i}]", x) for i, x in enumerate(memory)]
    values = [_decimal(f"runtimes[{i}]", x) for i, x in enumerate(runtimes)]
    capacity = _decimal("max_memory", max_memory)
    if len(weights) != len(values):
        raise ProblemError(
            f"memory and runtimes must have the same length, got {len(weights)} and "
            f"{len(values)}: give one runtime per item"
        )
    # Whole numbers, such as bytes, carry no rounding error.
    if any(x.denominator != 1 for x in (*weights, capacity)):
        capacity *= 1 + TOLERANCE
    everything = sum(weights, Fraction())
    all_fit = everything <= capacity  # a capacity above the total weight changes nothing
    capacity = min(capacity, everything)
    weight_scale, value_scale = _scale(weights), _scale(values)
    if weight_scale is None:
        # An item heavier than the capacity never fits, so lower its weight: the unit gets finer.
        weights = [min(w, 2 * capacity) for w in weights] if capacity else weights
        weight_scale = _coarse_scale(weights, _COARSE_WEIGHTS)
    if value_scale is None:
        value_scale = _coarse_scale(values, _COARSE_VALUES)
    scaled = tuple(math.ceil(w * weight_scale) for w in weights)
    return KnapsackProblem(
        weights=scaled,
        values=tuple(math.ceil(v * value_scale) for v in values),
        capacity=sum(scaled) if all_fit else math.floor(capacity * weight_scale),
    )


def _scale(numbers: Sequence[Fraction]) -> Fraction | None:
    """Return the least factor that makes all numbers integers; None if the integers' sum exceeds int64."""
    exact = math.lcm(*(x.denominator for x in numbers))
    return Fraction(exact) if sum(numbers, Fraction()) * exact <= INT64_MAX else None


def _coarse_scale(numbers: Sequence[Fraction], most: int) -> Fraction:
    """Return a factor such that the numbers times the factor, each rounded up, sum to at most ``most``."""
    return (most - len(numbers)) / (sum(numbers, Fraction()) or Fraction(1))


def _decimal(name: str, number: object) -> Fraction:
    integer = as_integer(number)
    if integer is not None:
        fraction = Fraction(integer)
    else:
        try:
            if isinstance(number, (bool, str)):
                raise TypeError
            as_float = float(number)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ProblemError(f"{name} must be a number, got {number!r}") from None
        if not math.isfinite(as_float):
            raise ProblemError(f"{name} must be finite, got {as_float!r}")
        # `repr` gives the decimal 0.1; the double's exact binary value is slightly more than a tenth.
        fraction = Fraction(repr(as_float))
    if fraction < 0:
        raise ProblemError(f"{name} must not be negative, got {number!r}")
    return fraction
