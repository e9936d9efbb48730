"""Reduce a knapsack to the undecided items, its *core*, and add the decided items to answers for the core."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic

from remat.solvers.base import Solver
from remat.solvers.knapsack.bounds import Relaxation
from remat.solvers.problem import KnapsackProblem, P
from remat.solvers.solution import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction(Generic[P]):
    """A problem reduced to the items or nodes that need a search, and the data to undo the reduction.

    Attributes:
        core: the problem of the remaining items or nodes, of which there may be none.
        remaining: for every item or node of the core, its index in the original problem.
        always: indices, in the original problem, of the removed items or nodes that are saved.
        always_value: for a knapsack, the total value of ``always``.
        value_unit: units of value, in the original problem, that make one unit in the core.
    """

    core: P
    remaining: tuple[int, ...]
    always: tuple[int, ...]
    always_value: int = 0
    value_unit: int = 1

    def invert(self, saved: Iterable[int]) -> tuple[int, ...]:
        """Convert a choice for the reduced problem to a choice for the original problem."""
        return tuple(sorted((*self.always, *(self.remaining[i] for i in saved))))

    def invert_answer(self, answer: Answer) -> Answer:
        """Convert an answer for the reduced problem to an answer for the original problem."""
        bound = answer.bound
        return replace(
            answer,
            saved=self.invert(answer.saved),
            bound=None if bound is None else self.always_value + self.value_unit * bound,
        )


def reduce(problem: KnapsackProblem) -> Reduction[KnapsackProblem]:
    """Decide the trivial items of a knapsack; the other items form the core of the result.

    Items of weight 0 are saved. Other items are not saved if they do not fit on their own or have value 0. If all
    remaining items fit together, they are saved. Common divisors of the weights and of the values are divided out. An
    optimum of the reduced problem extends to an optimum of the original problem.
    """
    weights, values, capacity = problem.weights, problem.values, problem.capacity
    always = [i for i, w in enumerate(weights) if w == 0]
    remaining = [
        i
        for i, (w, v) in enumerate(zip(weights, values, strict=True))
        if 0 < w <= capacity and v > 0
    ]
    if problem.weight_of(remaining) <= capacity:
        always, remaining = sorted((*always, *remaining)), []
    weight_unit = math.gcd(*(weights[i] for i in remaining)) or 1
    value_unit = math.gcd(*(values[i] for i in remaining)) or 1
    return Reduction(
        core=KnapsackProblem(
            weights=tuple(weights[i] // weight_unit for i in remaining),
            values=tuple(values[i] // value_unit for i in remaining),
            capacity=capacity // weight_unit,
        ),
        remaining=tuple(remaining),
        always=tuple(always),
        always_value=problem.value_of(always),
        value_unit=value_unit,
    )


def fix_variables(core: KnapsackProblem, relaxed: Relaxation) -> Reduction[KnapsackProblem]:
    """Decide items as in the linear relaxation if the opposite decision cannot beat the greedy choice.

    The *break item* is the first item in order of value per weight that no longer fits. The break item's value per
    weight is the price of capacity. The *loss* of an item is how much the opposite decision lowers the relaxation's
    bound at the price of capacity. An item is decided if the bound less the item's loss is at most the value of the
    greedy choice. Of ten thousand items, a few dozen remain undecided. An optimum of the undecided items extends to an
    optimum of the knapsack, unless ``relaxed.saved`` is already optimal.

    The method is that of Dembo and Hammer, "A reduction algorithm for knapsack problems", Methods of Operations
    Research 36 (1980).
    """
    weights, values = core.weights, core.values
    room, worth, prefix = core.capacity, 0, set[int]()
    for i in relaxed.order:
        if weights[i] > room:
            break
        room -= weights[i]
        worth += values[i]
        prefix.add(i)
    weight, value = weights[i], values[i]  # of the break item, which exists: not all items fit
    # Optimum of the relaxation, times `weight` to stay an integer.
    top = worth * weight + value * room
    most_loss = top - (relaxed.value + 1) * weight  # a larger loss rules out an improvement
    remaining = [
        j
        for j, (w, v) in enumerate(zip(weights, values, strict=True))
        if abs(v * weight - w * value) <= most_loss
    ]
    always = tuple(sorted(prefix.difference(remaining)))
    return Reduction(
        core=KnapsackProblem(
            weights=tuple(weights[j] for j in remaining),
            values=tuple(values[j] for j in remaining),
            capacity=core.capacity - core.weight_of(always),
        ),
        remaining=tuple(remaining),
        always=always,
        always_value=core.value_of(always),
    )


class CoreSolver(Solver):
    """Base class of knapsack solvers that search only the items that `reduce` leaves undecided.

    A subclass defines ``search`` instead of ``solve``. The knapsack passed to ``search`` has at least two
    items. Each item has a weight and a value above 0 and fits the capacity, but not all items fit together.
    """

    __slots__ = ()

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> Answer:
        """Reduce the problem, solve the reduced problem, and extend the answer to the whole problem."""
        reduction = reduce(problem)
        if not reduction.remaining:
            return reduction.invert_answer(Answer((), 0))
        return reduction.invert_answer(self.solve_core(reduction.core, time_limit=time_limit))

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Run `search` on the items that `fix_variables` leaves undecided; return an answer for ``core``."""
        relaxed = core.relaxed()
        if relaxed.value == relaxed.bound:
            return Answer(relaxed.saved, relaxed.value)
        fixed = fix_variables(core, relaxed)
        inner = reduce(fixed.core)
        inner_answer = Answer((), 0)
        if inner.remaining:
            inner_answer = self.search(inner.core, time_limit=time_limit)
        answer = fixed.invert_answer(inner.invert_answer(inner_answer))
        bound = relaxed.bound if answer.bound is None else min(answer.bound, relaxed.bound)
        # `fix_variables` keeps only choices better than `relaxed`, so the bound of the remaining items may
        # be below `relaxed.value` if no such choice exists.
        bound = max(bound, relaxed.value)
        if core.value_of(answer.saved) < relaxed.value:
            answer = replace(answer, saved=relaxed.saved)
        if core.value_of(answer.saved) == bound:
            return Answer(answer.saved, bound)
        return replace(answer, bound=bound)

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Solve the knapsack of the undecided items; subclasses define ``search``."""
        raise NotImplementedError
