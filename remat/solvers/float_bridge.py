"""The float signature in which PyTorch's partitioner asks for a knapsack.

``(memory, runtimes, max_memory) -> (total runtime saved, indices to save, indices to allow
recomputing)``, as in ``torch/_functorch/_activation_checkpointing/knapsack.py``. What differs:
floats mean the decimals they print as, so three items of 0.1 fit into 0.3; they become integers,
exactly where those fit into 63 bits, and otherwise so that the choice still fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from remat.errors import ProblemError
from remat.solvers.base import Solver
from remat.solvers.problem import INT64_MAX, KnapsackProblem, as_integer
from remat.solvers.run import run

KnapsackFn = Callable[[Sequence[float], Sequence[float], float], tuple[float, list[int], list[int]]]
_COARSE_LIMIT = 2**53 - 1


def knapsack_fn(solver: Solver) -> KnapsackFn:
    """Wrap a solver as a function of PyTorch's signature.

    Args:
        solver: whom to ask.

    Returns:
        A function of ``memory`` (per item, any unit), ``runtimes`` (per item, any unit) and
        ``max_memory`` (the unit of ``memory``). It returns the total runtime of the saved items
        and the sorted indices of the saved and of all other items, and raises `ProblemError` if an
        argument is not finite, negative or no number, and `SolverError` as `run` does.
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
    """Read floats as the shortest decimals that print like them, and scale those to integers.

    Where the common denominator would lead beyond 63 bits, memory is rounded up, the capacity down
    and runtimes up, in units that keep the sums within 53 bits.

    Raises:
        ProblemError: an argument is not finite, negative or no number, or the lengths differ.
    """
    weights = [_decimal(f"memory[{i}]", x) for i, x in enumerate(memory)]
    values = [_decimal(f"runtimes[{i}]", x) for i, x in enumerate(runtimes)]
    capacity = _decimal("max_memory", max_memory)
    if len(weights) != len(values):
        raise ProblemError(
            f"memory and runtimes must have the same length, got {len(weights)} and "
            f"{len(values)}: give one runtime per item"
        )
    capacity = min(capacity, sum(weights, Fraction()))  # more room than that changes nothing
    weight_scale, value_scale = _scale(weights), _scale(values)
    return KnapsackProblem(
        weights=tuple(math.ceil(w * weight_scale) for w in weights),
        values=tuple(math.ceil(v * value_scale) for v in values),
        capacity=math.floor(capacity * weight_scale),
    )


def _scale(numbers: Sequence[Fraction]) -> Fraction:
    """The factor that makes integers of all numbers, or the largest that keeps their sum small."""
    total = sum(numbers, Fraction())
    exact = math.lcm(*(x.denominator for x in numbers))
    if total * exact <= INT64_MAX:
        return Fraction(exact)
    return (_COARSE_LIMIT - len(numbers)) / total


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
        fraction = Fraction(repr(as_float))
    if fraction < 0:
        raise ProblemError(f"{name} must not be negative, got {number!r}")
    return fraction
