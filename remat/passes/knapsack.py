"""The decision under a memory budget: expensive candidates by a knapsack, the cheap rest by a cut (SPEC A7)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.graph.lowering import Lowered
from remat.passes.base import Choice, PassResult, State
from remat.passes.budgeted import Budgeted, least_decision
from remat.passes.candidates import candidates, with_states
from remat.passes.min_cut import MinCut, find_cut
from remat.solvers.graph_problem import evaluate
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run as run_solver

#: How often the solver is asked, at most, to fill what the completing cut left of the budget.
ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """A decision and what it comes to."""

    saved: tuple[int, ...]
    cost: int
    saved_bytes: int
    choice: Choice


@dataclass(frozen=True)
class Knapsack(Budgeted):
    """Keeps the saved bytes within a budget.

    Looser and looser cuts come first; where even the loosest saves too much, the nodes that it kept
    from recomputation become the items of a knapsack (weight: bytes; value: cost of recomputing),
    and one more cut, over plain bytes, completes what the solver picked. That cut can always save
    just what was picked, so the budget holds whatever the solver answers.
    """

    name: ClassVar[str] = "knapsack"
    summary: ClassVar[str] = "keep the saved bytes within a budget, by any solver"

    def run(self, state: State) -> PassResult:
        saved, choice = self.limits(state)
        capacity = choice.capacity or 0
        cut, lowered = state.cut or MinCut(), state.lowered(self.cost)
        if (choice.full_bytes or 0) <= capacity:
            return self._decided(state, lowered, saved, choice)
        looser = replace(
            cut,
            ban_used_far_apart=False,
            ban_long_fusible_chains=False,
            ban_materialized_backward=False,
        )
        loosest = replace(looser, ban_not_in_allowlist=False)
        found = [
            self._scored(lowered, options.solve(state), replace(choice, solver=name))
            for name, options in (("looser cut", looser), ("loosest cut", loosest))
        ]
        found = [f for f in found if f.saved_bytes <= capacity]
        # Where the loosest cut fits, everything expensive can be kept: the room that is left goes to
        # what only the tighter cut keeps.
        found += self._by_knapsack(state, lowered, cut if found else loosest, choice)
        best = min(found, key=lambda f: (f.cost, f.saved_bytes))
        return self._decided(state, lowered, best.saved, best.choice)

    def _by_knapsack(
        self, state: State, lowered: Lowered, cut: MinCut, choice: Choice
    ) -> list[_Scored]:
        """Lets the solver pick among a cut's candidates, and completes its picks.

        The completing cut often finds something smaller than what was picked; the room that leaves
        is offered to the solver again, a few times.
        """
        solver = self.asked()
        capacity = choice.capacity or 0
        items = candidates(state, lowered, cut.banned(state))
        weights = tuple(nbytes for _, nbytes in items.candidates)
        values = tuple(lowered.problem.cost[i] for i, _ in items.candidates)
        offered = max(0, capacity - items.forced_bytes)
        choice = replace(choice, solver=solver.name, items=len(items.candidates))
        found: list[_Scored] = []
        for _ in range(ROUNDS):
            problem = KnapsackProblem(weights=weights, values=values, capacity=offered)
            solution = run_solver(solver, problem, time_limit=self.time_limit or None)
            choice = replace(
                choice,
                elapsed_s=choice.elapsed_s + solution.elapsed_s,
                deterministic=choice.deterministic and solution.deterministic,
            )
            fixed = list(items.fixed)
            for k in solution.saved:
                fixed[items.candidates[k][0]] = True
            scored = self._scored(lowered, find_cut(state, lowered, fixed, biased=False), choice)
            room = capacity - scored.saved_bytes
            if room < 0:
                break
            found.append(scored)
            if room * 100 < capacity or solution.weight == sum(weights):
                break
            offered += room
        return found or [self._scored(lowered, least_decision(state), choice)]

    @staticmethod
    def _scored(lowered: Lowered, saved: tuple[int, ...], choice: Choice) -> _Scored:
        scored = evaluate(lowered.problem, with_states(lowered, saved))
        return _Scored(
            saved=saved,
            cost=scored.recompute_cost,
            saved_bytes=scored.saved_bytes,
            choice=replace(choice, recompute_cost=scored.recompute_cost),
        )

    def _decided(
        self, state: State, lowered: Lowered, saved: tuple[int, ...], choice: Choice
    ) -> PassResult:
        nbytes = sum(lowered.problem.size[i] for i in saved)
        after = replace(state, decision=lowered.decision(saved), choice=choice)
        return PassResult(
            state=after,
            modified=True,
            detail=f"{nbytes} of {choice.capacity} bytes saved, by {choice.solver}",
        )
