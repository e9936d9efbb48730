"""Taking out of a knapsack what needs no search, and putting it back into the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from remat.solvers.base import Solver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.solution import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A knapsack without its easy part. Exact: an optimum of the core lifts to an optimum.

    Items that weigh nothing are saved; items that fit nowhere or are worth nothing are not; if the
    rest fits together it is saved. Common divisors of weights and of values are divided out.

    Attributes:
        core: what is left to decide; without items if nothing is.
        kept: for every item of the core, its index in the original problem.
        always: original indices that are saved in any case.
        always_value: their value.
        value_unit: what one unit of value in the core is worth in the original.
    """

    core: KnapsackProblem
    kept: tuple[int, ...]
    always: tuple[int, ...]
    always_value: int
    value_unit: int

    def lift(self, answer: Answer) -> Answer:
        """Turn an answer to the core into one to the original problem."""
        bound = answer.bound
        return replace(
            answer,
            saved=sorted((*self.always, *(self.kept[i] for i in answer.saved))),
            bound=None if bound is None else self.always_value + self.value_unit * bound,
        )


def reduce(problem: KnapsackProblem) -> Reduction:
    """Split a problem into what is decided and the core that is not."""
    weights, values, capacity = problem.weights, problem.values, problem.capacity
    always = [i for i, w in enumerate(weights) if w == 0]
    kept = [
        i
        for i, (w, v) in enumerate(zip(weights, values, strict=True))
        if 0 < w <= capacity and v > 0
    ]
    if problem.weight_of(kept) <= capacity:
        always, kept = sorted((*always, *kept)), []
    weight_unit = math.gcd(*(weights[i] for i in kept)) or 1
    value_unit = math.gcd(*(values[i] for i in kept)) or 1
    return Reduction(
        core=KnapsackProblem(
            weights=tuple(weights[i] // weight_unit for i in kept),
            values=tuple(values[i] // value_unit for i in kept),
            capacity=capacity // weight_unit,
        ),
        kept=tuple(kept),
        always=tuple(always),
        always_value=problem.value_of(always),
        value_unit=value_unit,
    )


class ReducingSolver(Solver):
    """A solver that sees only cores: give it ``solve_core`` instead of ``solve``.

    In a core every item weighs something, is worth something and fits on its own, not all items
    fit together, and there are at least two.
    """

    __slots__ = ()

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> Answer:
        """Reduce the problem, solve what is left, and lift the answer."""
        reduction = reduce(problem)
        if not reduction.kept:
            return reduction.lift(Answer((), 0))
        return reduction.lift(self.solve_core(reduction.core, time_limit=time_limit))

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Solve a problem that `reduce` left over; as ``solve`` otherwise."""
        raise NotImplementedError
