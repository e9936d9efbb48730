"""Reduce a knapsack to its undecided core, and extend an answer on the core to the whole problem."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic

from remat.solvers.base import Solver
from remat.solvers.bounds import Relaxation, relax
from remat.solvers.problem import KnapsackProblem, P
from remat.solvers.solution import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction(Generic[P]):
    """A problem without some items, or nodes, that are decided.

    Attributes:
        core: what is left to decide; empty if nothing is.
        kept: for every item of the core, its index in the original problem.
        always: original indices that are saved in any case.
        always_value: their value, for a knapsack.
        value_unit: what one unit of value or cost in the core is worth in the original.
    """

    core: P
    kept: tuple[int, ...]
    always: tuple[int, ...]
    always_value: int = 0
    value_unit: int = 1

    def invert(self, saved: Iterable[int]) -> tuple[int, ...]:
        """Turn a choice for the core into one for the original problem."""
        return tuple(sorted((*self.always, *(self.kept[i] for i in saved))))

    def invert_answer(self, answer: Answer) -> Answer:
        """Turn an answer to the core into one to the original problem."""
        bound = answer.bound
        return replace(
            answer,
            saved=self.invert(answer.saved),
            bound=None if bound is None else self.always_value + self.value_unit * bound,
        )


def reduce(problem: KnapsackProblem) -> Reduction[KnapsackProblem]:
    """Split a problem into what is decided and the core that is not; an optimum inverts to an optimum.

    Items that weigh nothing are saved; items that fit nowhere or are worth nothing are not; if the
    rest fits together it is saved. Common divisors of weights and of values are divided out.
    """
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


def fix_variables(core: KnapsackProblem, relaxed: Relaxation) -> Reduction[KnapsackProblem]:
    """Decide every item that cannot be decided otherwise in an answer better than ``relaxed``.

    With the break item's value per weight as the price of room, every item has a loss: what the
    relaxation loses at least if the item is decided against that price. An item whose loss leaves no
    more than a known answer is decided. On problems of ten thousand items some dozens remain. An
    optimum of those inverts to an optimum, unless ``relaxed.saved`` is one already.

    Source: R. S. Dembo, P. L. Hammer, "A reduction algorithm for knapsack problems", Methods of
    Operations Research 36 (1980).

    Args:
        core: what `reduce` left over.
        relaxed: its relaxation.
    """
    weights, values = core.weights, core.values
    room, worth, prefix = core.capacity, 0, set[int]()
    for i in relaxed.order:
        if weights[i] > room:
            break
        room -= weights[i]
        worth += values[i]
        prefix.add(i)
    weight, value = weights[i], values[i]  # of the break item, which a core has
    top = worth * weight + value * room  # the relaxation's optimum, times that weight
    most_loss = top - (relaxed.value + 1) * weight  # what leaves a better answer possible
    kept = [
        j
        for j, (w, v) in enumerate(zip(weights, values, strict=True))
        if abs(v * weight - w * value) <= most_loss
    ]
    always = tuple(sorted(prefix.difference(kept)))
    return Reduction(
        core=KnapsackProblem(
            weights=tuple(weights[j] for j in kept),
            values=tuple(values[j] for j in kept),
            capacity=core.capacity - core.weight_of(always),
        ),
        kept=tuple(kept),
        always=always,
        always_value=core.value_of(always),
    )


class CoreSolver(Solver):
    """A solver that sees only what bounds leave undecided: give it ``search`` instead of ``solve``.

    In a core every item weighs something, is worth something and fits on its own, not all items
    fit together, and there are at least two.
    """

    __slots__ = ()

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> Answer:
        """Reduce the problem, solve the core, and extend the answer to the problem."""
        reduction = reduce(problem)
        if not reduction.kept:
            return reduction.invert_answer(Answer((), 0))
        return reduction.invert_answer(self.solve_core(reduction.core, time_limit=time_limit))

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Fix variables, search the rest, and return the better of the result and the greedy answer."""
        relaxed = relax(core)
        if relaxed.value == relaxed.bound:
            return Answer(relaxed.saved, relaxed.value)
        fixed = fix_variables(core, relaxed)
        inner = reduce(fixed.core)
        found = Answer((), 0)
        if inner.kept:
            found = self.search(inner.core, time_limit=time_limit)
        answer = fixed.invert_answer(inner.invert_answer(found))
        bound = relaxed.bound if answer.bound is None else min(answer.bound, relaxed.bound)
        bound = max(bound, relaxed.value)
        if core.value_of(answer.saved) < relaxed.value:
            answer = replace(answer, saved=relaxed.saved)
        if core.value_of(answer.saved) == bound:
            return Answer(answer.saved, bound)
        return replace(answer, bound=bound)

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Solve a core that is left undecided; as ``solve_core`` otherwise."""
        raise NotImplementedError
