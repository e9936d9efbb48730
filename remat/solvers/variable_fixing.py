"""Deciding the clear items of a knapsack by bounds, so that a search sees only the others.

With the break item's value per weight as the price of room, every item has a loss: what the
relaxation loses at least if the item is decided against that price. An item whose loss leaves no
more than a known answer is decided. On problems of ten thousand items some dozens remain.

Source: R. S. Dembo, P. L. Hammer, "A reduction algorithm for knapsack problems", Methods of
Operations Research 36 (1980).
"""

from __future__ import annotations

from dataclasses import replace

from remat.solvers.bounds import Relaxation, relax
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import ReducingSolver, Reduction, reduce
from remat.solvers.solution import Answer


def peel(core: KnapsackProblem, relaxed: Relaxation) -> Reduction:
    """Decide every item that cannot be decided otherwise in an answer better than ``relaxed``.

    Exact as far as better answers go: an optimum of what is left lifts to an optimum, unless
    ``relaxed.saved`` is one already.

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
    open_items = [
        j
        for j, (w, v) in enumerate(zip(weights, values, strict=True))
        if abs(v * weight - w * value) <= most_loss
    ]
    kept = set(open_items)
    always = tuple(sorted(prefix - kept))
    return Reduction(
        core=KnapsackProblem(
            weights=tuple(weights[j] for j in open_items),
            values=tuple(values[j] for j in open_items),
            capacity=core.capacity - core.weight_of(always),
        ),
        kept=tuple(open_items),
        always=always,
        always_value=core.value_of(always),
        value_unit=1,
    )


class PeelingSolver(ReducingSolver):
    """A solver that sees only what bounds leave undecided: give it ``search`` instead of ``solve``."""

    __slots__ = ()

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Peel the core, search what is left, and keep the better of that and the greedy answer."""
        relaxed = relax(core)
        floor = Answer(relaxed.saved, relaxed.value)
        if relaxed.value == relaxed.bound:
            return floor
        peeled = peel(core, relaxed)
        inner = reduce(peeled.core)
        found = Answer((), 0)
        if inner.kept:
            found = self.search(inner.core, time_limit=time_limit)
        answer = peeled.lift(inner.lift(found))
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
