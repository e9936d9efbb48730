"""The search for a plan: programs with more and more cuts, until what one of them says fits.

Where few decisions are near a program's bound, `remat.sac.solve.label_merging` finds the best by merging,
in milliseconds; the rest is for a solver. Both are exact for the cuts that are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat.errors import BudgetError, SolverError
from remat.sac.estimate.modules import ModuleTree
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.choices import ModuleChoice, hull
from remat.sac.solve.cuts import BudgetCut, CutMaker
from remat.sac.solve.label_merging import TooManyLabelsError, cheapest
from remat.sac.solve.module_classes import (
    Decision,
    ModuleClass,
    below,
    classes,
    columns,
    picoseconds,
    place,
)
from remat.sac.solve.peaks import Simulated, moments_of_interest, simulate
from remat.sac.solve.program import Backend, Linear
from remat.units import format_bytes

#: Programs solved for one plan, at most, and how many cuts each failure adds.
ROUNDS, CUTS = 60, 8
#: How often the budget is lowered where results that are stored early exceed it within forward.
LOWERED = 6
#: Choices in all modules together beyond which equal modules are not told apart by cuts.
MOST_APART = 6_000
#: Choices in all modules together beyond which, with every module by itself, only those on the hulls
#: of memory and time are looked at.
MOST_CHOICES = 2_000
#: Gap at which programs stop as long as their answers only show what is missing.
_LOOSE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnswer:
    """A solution of a program.

    Attributes:
        counts: how often each choice is taken; see `remat.sac.solve.module_classes.columns`.
        bound: lower bound on the time of all solutions, in picoseconds.
        exact: whether it is optimal for the cuts.
    """

    counts: Ints
    bound: float
    exact: bool


def solve(
    found: Sequence[ModuleClass],
    cuts: Sequence[BudgetCut],
    backend: Backend,
    gap: float,
    *,
    at_least: float = 0.0,
    merging: bool = True,
) -> ProgramAnswer | None:
    """Finds the counts of least time; None if no counts meet the cuts.

    Args:
        found: the classes.
        cuts: what the budget demands.
        backend: the solver for what label merging cannot solve.
        gap: relative gap at which it may stop.
        at_least: a known lower bound, in picoseconds.
        merging: whether to try label merging first.

    Raises:
        SolverError: the backend ended without an answer.
    """
    if not found:
        fits = all(cut.need <= 0 for cut in cuts)
        return (
            ProgramAnswer(counts=np.zeros(0, dtype=np.int64), bound=0.0, exact=True)
            if fits
            else None
        )
    times = picoseconds(found)
    linear = Linear.of(found, cuts, times)
    prices = linear.prices() if merging else None
    at_most = np.inf
    if prices is not None:
        try:
            counts, best, bound = cheapest(found, cuts, times, prices, at_least, gap)
            return ProgramAnswer(counts=counts, bound=bound, exact=bound == best)
        except TooManyLabelsError as many:
            at_most = np.inf if many.good is None else float(many.good[1])
    answer = linear.solve(backend, gap, at_most)
    if answer is None:
        return None
    counts, bound = answer
    spent = int(times @ counts)
    # One picosecond of each choice taken is for sums of floats.
    exact = spent - bound <= max(1.0, 1e-7 * spent)
    return ProgramAnswer(counts=counts, bound=min(bound, float(spent)), exact=exact)


def floor(found: Sequence[ModuleClass], cuts: Sequence[BudgetCut], bound: float) -> float:
    """A lower bound that holds for omitted choices too, in picoseconds.

    Omitted choices may be faster than those that stand for them, by `ModuleChoice.slack_ps` at most. A
    decision with a choice whose reduced cost, at its time less that slack, is beyond the bound is not below
    the bound. Any other is below it by at most the slack of its choices together.

    Args:
        found: the classes.
        cuts: what the budget demands.
        bound: lower bound over the choices that were not omitted, in picoseconds.
    """
    slack = picoseconds(found, slack=True)
    if not slack.any():
        return bound
    linear = Linear.of(found, cuts, picoseconds(found) - slack)
    if linear.relaxed is not None:
        reach = bound / linear.unit - linear.relaxed.value
        slack[linear.relaxed.reduced > reach * (1.0 + 1e-9)] = 0
    most = [int(slack[at].max(initial=0)) for at in columns(found)]  # for one member
    inner = below(found)
    for c in reversed(range(len(found))):  # what is below a member may be chosen in its stead
        most[c] = max(most[c], sum(found[d].each * most[d] for d in inner[c]))
    return bound - sum(len(found[c].members) * most[c] for c in inner[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A decision that fits, and a lower bound on the time of any that fits."""

    decision: Decision
    simulated: Simulated
    bound_ps: float


class InfeasibleError(Exception):
    """The cuts alone cannot be met."""


class PlanSearch:
    """Looks for the best decision.

    Args:
        tree: the modules.
        options: what may be chosen, by module.
        plain: bytes alive by moment without checkpointing.
        backend: who solves programs.
    """

    def __init__(
        self,
        tree: ModuleTree,
        options: Mapping[int, tuple[ModuleChoice, ...]],
        plain: Ints,
        backend: Backend,
    ) -> None:
        self._tree, self._options, self._plain = tree, options, plain
        self._backend = backend
        self._found = classes(tree, options)
        self._moments = moments_of_interest(tree, options, plain)

    def within(self, budget: int) -> Outcome:
        """The best decision within a budget.

        Raises:
            BudgetError: nothing fits.
        """
        apart = classes(self._tree, self._options, apart=True)
        kinds = [self._found]
        if len(apart) > len(self._found) and sum(len(c.choices) for c in apart) <= MOST_APART:
            kinds.append(apart)
        bound = 0.0
        last = None
        try:
            for kind in kinds:
                found, bound = self._by_cuts(kind, budget, bound)
                if found is not None:
                    return found
            last = self._by_module(budget)
        except InfeasibleError:
            bound = 0.0
        if last is None:
            return self._least(budget, bound)
        return Outcome(decision=last[0], simulated=last[1], bound_ps=bound)

    def _by_cuts(
        self, found: Sequence[ModuleClass], budget: int, bound: float
    ) -> tuple[Outcome | None, float]:
        """The decision that a program with cuts finds, None where cuts cannot exclude it; and its bound."""
        cutter = CutMaker(self._tree, found, self._plain)
        cuts = [cutter.at(t, budget) for t in self._tops()]
        gap, merging = max(self._backend.gap, _LOOSE), True
        for _ in range(ROUNDS):
            answer = solve(found, cuts, self._backend, gap, at_least=bound, merging=merging)
            if answer is None:
                raise InfeasibleError
            bound = max(bound, answer.bound)
            last = answer.exact or gap == self._backend.gap
            decision, simulated = self._follow(found, answer.counts)
            if simulated.peak_bytes <= budget and last:
                bound = floor(found, cuts, bound)
                return Outcome(decision=decision, simulated=simulated, bound_ps=bound), bound
            fresh = self._fails(found, cutter, decision, simulated, budget, answer)
            if not fresh and last:
                return None, floor(found, cuts, bound)
            cuts += fresh
            merging = bool(fresh)  # of the same cuts, merging has failed
            gap = gap if fresh else self._backend.gap
        return None, floor(found, cuts, bound)

    def _by_module(self, budget: int) -> tuple[Decision, Simulated] | None:
        """The program with every module by itself, of which many choices are left out.

        Which of two equal modules gets what can matter while backward is within one of them.
        """
        whole = sum(len(c.members) * len(c.choices) for c in self._found) <= MOST_CHOICES
        few = {k: c.choices if whole else hull(c.choices) for c in self._found for k in c.members}
        found = classes(self._tree, few, apart=True)
        cutter = CutMaker(self._tree, found, self._plain)
        lowered = budget
        for _ in range(LOWERED):
            cuts = cutter.everywhere(self._moments, lowered)
            try:
                answer = solve(found, cuts, self._backend, self._backend.gap, merging=False)
            except SolverError:
                return None
            if answer is None:
                return None
            decision, simulated = self._follow(found, answer.counts)
            if simulated.peak_bytes <= budget:
                return decision, simulated
            lowered -= max(simulated.peak_bytes - budget, 1)
        return None

    def _of_least_peak(self) -> tuple[Decision, Simulated] | None:
        """The decision of the lowest peak, where modules keep the least that they can."""
        least = {k: c.choices[-1:] for c in self._found for k in c.members}
        found = classes(self._tree, least, apart=True)
        if not found:
            return None
        cuts = CutMaker(self._tree, found, self._plain).everywhere(self._moments, 0)
        try:
            answer = Linear.of(found, cuts).solve(self._backend, self._backend.gap)
        except SolverError:
            return None
        return None if answer is None else self._follow(found, answer[0])

    def _follow(self, found: Sequence[ModuleClass], counts: Ints) -> tuple[Decision, Simulated]:
        decision = place(found, counts)
        return decision, simulate(self._tree, decision, self._plain)

    def _tops(self) -> list[int]:
        """The moment with most memory, in backward where there is one."""
        back = [t for t in self._moments if t >= self._tree.forward_end]
        return sorted(back or self._moments, key=lambda t: -int(self._plain[t]))[:1]

    def _fails(
        self,
        found: Sequence[ModuleClass],
        cutter: CutMaker,
        decision: Decision,
        simulated: Simulated,
        budget: int,
        answer: ProgramAnswer,
    ) -> list[BudgetCut]:
        """Cuts that a decision over the budget violates, the worst moments first."""
        over = [t for t in self._moments if simulated.memory[t] > budget]
        over.sort(key=lambda t: -int(simulated.memory[t]))
        made = [cutter.at(t, budget, decision) for t in over[:CUTS]]
        class_of = {k: c for c, one in enumerate(found) for k in one.members}
        for (k, i), peak in simulated.reruns.items():
            if peak > budget:
                cut = cutter.rerun(class_of[k], i, budget, decision)
                made += [] if cut is None else [cut]
        return [cut for cut in made if cut.missing(answer.counts) > 0]

    def _least(self, budget: int, bound: float = 0.0) -> Outcome:
        """The decision of the lowest peak, if it fits; else the error names that peak."""
        found = self._of_least_peak()
        least = int(self._plain.max(initial=0)) if found is None else found[1].peak_bytes
        if found is not None and least <= budget:  # the programs ended at their limits
            return Outcome(decision=found[0], simulated=found[1], bound_ps=bound)
        raise BudgetError(
            f"no plan fits into {format_bytes(budget)} ({budget} bytes): the least that checkpointing "
            f"gets the step to is {least} bytes ({format_bytes(least)}), so the budget is short by "
            f"{least - budget} bytes. Raise it, make the batch smaller, or spread parameters over "
            "more ranks"
        )
