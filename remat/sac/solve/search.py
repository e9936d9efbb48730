"""The search for a plan: programs with more and more cuts, until what one of them says fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat.errors import BudgetError
from remat.graph.budget import format_bytes
from remat.sac.estimate.calls import Bytes
from remat.sac.estimate.modules import ModuleTree
from remat.sac.solve.choices import Choices
from remat.sac.solve.cuts import Cut, Cutter
from remat.sac.solve.expanded import Expanded, seen
from remat.sac.solve.module_classes import Decision, ModuleClass, classes, place
from remat.sac.solve.peaks import Simulated, moments_of_interest, simulate
from remat.sac.solve.program import Answer, Backend, floor, solve
from remat.solvers.pulp_cbc import load_pulp

#: Branch-and-bound nodes where each module is a part of the program by itself.
SMALL_NODES = 1_000
#: Programs solved for one plan, at most, and how many cuts each failure adds.
ROUNDS, CUTS = 60, 8
#: How often the budget is lowered where what is held longer in forward is too much.
LOWERED = 6
#: Choices in all modules together beyond which equal modules are not told apart by cuts.
MOST_APART = 6_000
#: Gap at which programs stop as long as their answers only show what is missing.
_LOOSE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A decision that fits, and the least picoseconds that any needs."""

    decision: Decision
    simulated: Simulated
    bound_ps: float


class InfeasibleError(Exception):
    """Not even the cuts can be met."""


class Search:
    """Looks for the best decision.

    Args:
        tree: the modules.
        options: what may be chosen, by module.
        plain: bytes alive by moment without checkpointing.
        backend: who solves programs.
    """

    def __init__(
        self, tree: ModuleTree, options: Mapping[int, Choices], plain: Bytes, backend: Backend
    ) -> None:
        self._tree, self._options, self._plain = tree, options, plain
        self._backend = backend
        self._found = classes(tree, options)
        self._moments = moments_of_interest(tree, options, plain)

    def within(self, budget: int) -> Found:
        """The best decision within a budget.

        Raises:
            BudgetError: nothing fits.
        """
        apart = classes(self._tree, self._options, apart=True)
        kinds = [self._found]
        if len(apart) > len(self._found) and sum(len(c.choices) for c in apart) <= MOST_APART:
            kinds.append(apart)
        bound = 0.0
        try:
            for kind in kinds:
                found, bound = self._by_cuts(kind, budget, bound)
                if found is not None:
                    return found
        except InfeasibleError:
            return self._least(budget)
        last = self._by_module(budget)
        if last is None:
            return self._least(budget, bound)
        return Found(decision=last[0], simulated=last[1], bound_ps=bound)

    def _by_cuts(
        self, found: Sequence[ModuleClass], budget: int, bound: float
    ) -> tuple[Found | None, float]:
        """What a program with cuts finds, if cuts can say what is missing; and its bound."""
        cutter = Cutter(self._tree, found, self._plain)
        cuts = [cutter.at(t, budget) for t in self._tops()]
        gap, merging = max(self._backend.gap, _LOOSE), True
        for _ in range(ROUNDS):
            answer = solve(found, cuts, self._backend, gap, at_least=bound, merging=merging)
            if answer is None:
                raise InfeasibleError
            bound = max(bound, answer.bound)
            last = answer.exact or gap == self._backend.gap
            decision = place(found, answer.counts)
            simulated = simulate(self._tree, decision, self._plain)
            if simulated.peak_bytes <= budget and last:
                bound = floor(found, cuts, bound)
                return Found(decision=decision, simulated=simulated, bound_ps=bound), bound
            fresh = self._fails(found, cutter, decision, simulated, budget, answer)
            if not fresh and last:
                return None, floor(found, cuts, bound)
            cuts += fresh
            merging = bool(fresh)  # of the same cuts, merging has failed
            gap = gap if fresh else self._backend.gap
        return None, floor(found, cuts, bound)

    def _by_module(self, budget: int | None) -> tuple[Decision, Simulated] | None:
        """The program with every module by itself; without a budget, for the lowest peak."""
        options = (
            seen(self._found)
            if budget is not None
            else {k: c.choices[-1:] for c in self._found for k in c.members}
        )
        lowered = budget
        for _ in range(LOWERED):
            program = Expanded(self._tree, options, self._plain, lowered)
            status = self._backend.run(program.model, self._backend.gap, SMALL_NODES)
            if status != load_pulp().LpStatusOptimal:
                return None
            decision = program.decision()
            simulated = simulate(self._tree, decision, self._plain)
            if budget is None or lowered is None or simulated.peak_bytes <= budget:
                return decision, simulated
            lowered -= max(simulated.peak_bytes - budget, 1)
        return None

    def _tops(self) -> list[int]:
        """The moment with most memory, in backward where there is one."""
        back = [t for t in self._moments if t >= self._tree.forward_end]
        return sorted(back or self._moments, key=lambda t: -int(self._plain[t]))[:1]

    def _fails(
        self,
        found: Sequence[ModuleClass],
        cutter: Cutter,
        decision: Decision,
        simulated: Simulated,
        budget: int,
        answer: Answer,
    ) -> list[Cut]:
        """Cuts that say why a decision does not fit, the worst moments first."""
        over = [t for t in self._moments if simulated.memory[t] > budget]
        over.sort(key=lambda t: -int(simulated.memory[t]))
        made = [cutter.at(t, budget, decision) for t in over[:CUTS]]
        class_of = {k: c for c, one in enumerate(found) for k in one.members}
        for (k, _), peak in simulated.reruns.items():
            if peak > budget:
                cut = cutter.rerun(class_of[k], budget, decision)
                made += [] if cut is None else [cut]
        return [cut for cut in made if cut.missing(answer.counts) > 0]

    def _least(self, budget: int, bound: float = 0.0) -> Found:
        """The decision of the lowest peak, if that fits; where it does not, it is what is said."""
        found = self._by_module(None)
        least = int(self._plain.max(initial=0)) if found is None else found[1].peak_bytes
        if found is not None and least <= budget:  # the programs ended at their limits
            return Found(decision=found[0], simulated=found[1], bound_ps=bound)
        raise BudgetError(
            f"no plan fits into {format_bytes(budget)} ({budget} bytes): the least that checkpointing "
            f"gets the step to is {least} bytes ({format_bytes(least)}), so the budget is short by "
            f"{least - budget} bytes. Raise it, make the batch smaller, or spread parameters over "
            "more ranks"
        )
