"""The decision under a memory budget: expensive candidates by a knapsack, the cheap rest by a cut (SPEC A7)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from remat.errors import PlanError
from remat.graph.budget import Budget
from remat.graph.costs import CostModel, Roofline
from remat.graph.lowering import Kind, Lowered
from remat.graph.roles import UNREACHABLE
from remat.passes.base import Choice, Pass, PassResult, Stage, State
from remat.passes.min_cut import MinCut, find_cut, require_tangents
from remat.solvers.base import Solver
from remat.solvers.graph_problem import evaluate
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run as run_solver

#: How often the solver is asked, at most, to fill what the completing cut left of the budget.
ROUNDS = 4


@dataclass(frozen=True)
class Knapsack(Pass):
    """Keeps the saved bytes within a budget.

    Looser and looser cuts come first; where even the loosest saves too much, the nodes that it kept
    from recomputation become the items of a knapsack (weight: bytes; value: cost of recomputing),
    and one more cut, over plain bytes, completes what the solver picked. That cut can always save
    just what was picked, so the budget holds whatever the solver answers.

    Attributes:
        solver: who solves the knapsack; handed over by whoever composes the pipeline.
        budget: the budget, as `remat.plan` reads it.
        cost: the cost model that values the items.
        time_limit: seconds for the solver; no clock where 0.
    """

    name: ClassVar[str] = "knapsack"
    stage: ClassVar[Stage] = Stage.DECIDE
    summary: ClassVar[str] = "keep the saved bytes within a budget, by any solver"

    solver: Solver | None = None
    budget: Budget = Budget(share=1.0)
    cost: CostModel = Roofline()
    time_limit: float = 0.0

    def run(self, state: State) -> PassResult:
        require_tangents(state)
        cut = state.cut or MinCut()
        lowered = state.lowered(self.cost)
        size = lowered.problem.size

        def bytes_of(saved: tuple[int, ...]) -> int:
            return sum(size[i] for i in saved)

        full_cut = cut.solve(state)
        least_cut = self.least(state)
        full, least = bytes_of(full_cut), bytes_of(least_cut)
        capacity = self.budget.capacity(full=max(full, least), least=least)
        choice = Choice(capacity=capacity, full_bytes=full, least_bytes=least)
        looser = replace(
            cut,
            ban_used_far_apart=False,
            ban_long_fusible_chains=False,
            ban_materialized_backward=False,
        )
        loosest = replace(looser, ban_not_in_allowlist=False)
        for name, options in (("min-cut", cut), ("looser cut", looser), ("loosest cut", loosest)):
            saved = options.solve(state)
            if bytes_of(saved) <= capacity:
                return self._decided(state, lowered, saved, replace(choice, solver=name))
        if self.solver is None:
            raise PlanError(
                "the knapsack pass was given no solver; hand it one, for example "
                "Knapsack(solver=remat.plugins.registry().solver('greedy'), budget=...)"
            )
        saved, choice = self._by_knapsack(state, lowered, loosest, capacity, choice)
        return self._decided(state, lowered, saved, choice)

    @staticmethod
    def least(state: State) -> tuple[int, ...]:
        """The decision that saves the fewest bytes that any decision can."""

        def compute() -> tuple[int, ...]:
            lowered = state.lowered()
            return find_cut(state, lowered, [False] * len(lowered.problem), biased=False)

        return state.known("least", compute)

    def _by_knapsack(
        self, state: State, lowered: Lowered, loosest: MinCut, capacity: int, choice: Choice
    ) -> tuple[tuple[int, ...], Choice]:
        """Lets the solver pick among the loosest cut's candidates, and completes the pick.

        The completing cut often finds something smaller than what was picked; the room that leaves
        is offered to the solver again, a few times, and the best result counts.
        """
        assert self.solver is not None
        problem = lowered.problem
        items = candidates(state, lowered, loosest.banned(state))
        weights = tuple(nbytes for _, nbytes in items.candidates)
        values = tuple(problem.cost[i] for i, _ in items.candidates)
        offered = max(0, capacity - items.forced_bytes)
        results: list[tuple[int, int, tuple[int, ...]]] = []
        elapsed, deterministic = 0.0, True
        for _ in range(ROUNDS):
            knapsack = KnapsackProblem(weights=weights, values=values, capacity=offered)
            solution = run_solver(self.solver, knapsack, time_limit=self.time_limit or None)
            elapsed += solution.elapsed_s
            deterministic &= solution.deterministic
            fixed = list(items.fixed)
            for k in solution.saved:
                fixed[items.candidates[k][0]] = True
            saved = find_cut(state, lowered, fixed, biased=False)
            scored = evaluate(problem, _with_states(lowered, saved))
            if scored.saved_bytes > capacity:
                break
            results.append((scored.recompute_cost, scored.saved_bytes, saved))
            room = capacity - scored.saved_bytes
            if room * 100 < capacity or solution.weight == sum(weights):
                break
            offered += room
        saved = min(results)[2] if results else self.least(state)
        return saved, replace(
            choice,
            solver=self.solver.name,
            items=len(items.candidates),
            deterministic=deterministic,
            elapsed_s=elapsed,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The knapsack inside a graph problem.

    Attributes:
        candidates: operators to keep or to allow recomputing, with the bytes that keeping one adds:
            of all its results that backward can reach, less the generator state it saves. Largest
            first.
        fixed: for each node of the problem, whether it is kept in any case.
        forced_bytes: bytes that are saved in any case, if backward reads them at all.
    """

    candidates: tuple[tuple[int, int], ...]
    fixed: tuple[bool, ...]
    forced_bytes: int


def candidates(state: State, lowered: Lowered, ban: bytearray) -> Items:
    """Finds the operators that the loosest cut keeps from recomputation, and what they weigh."""
    problem, distance = lowered.problem, state.roles.distance
    fixed = [False] * len(problem)
    weight: dict[int, int] = {}
    state_bytes: dict[int, int] = {}
    forced = 0
    for i, kind in enumerate(lowered.kind):
        if kind is Kind.SNAPSHOT:
            forced += problem.size[i]
        if kind is not Kind.VALUE or distance[lowered.position[i]] >= UNREACHABLE:
            continue
        producer = _producer(state, lowered, i)
        if not problem.recomputable[i] or not problem.recomputable[producer]:
            forced += problem.size[i]
        elif ban[lowered.position[producer]]:
            weight[producer] = weight.get(producer, 0) + problem.size[i]
    for i in weight:
        for j in problem.inputs[i]:
            if lowered.kind[j] is Kind.GENERATOR_STATE:
                state_bytes[i] = problem.size[j]
    chosen: list[tuple[int, int]] = []
    for i, nbytes in weight.items():
        spare = state_bytes.get(i, 0)
        if nbytes <= spare:  # the value is smaller than the state that would replay it
            fixed[i] = True
            forced += nbytes
        else:
            forced += spare
            chosen.append((i, nbytes - spare))
    chosen.sort(key=lambda item: (-item[1], item[0]))
    return Items(candidates=tuple(chosen), fixed=tuple(fixed), forced_bytes=forced)


def _with_states(lowered: Lowered, saved: tuple[int, ...]) -> set[int]:
    """A cut's nodes with every generator state: only those of replayed operators are counted."""
    return {*saved, *(i for i, k in enumerate(lowered.kind) if k is Kind.GENERATOR_STATE)}


def _producer(state: State, lowered: Lowered, i: int) -> int:
    """The operator behind an element of a tuple; any other node stands for itself."""
    node = state.index.nodes[lowered.position[i]]
    while (
        getattr(node.target, "__name__", "") == "getitem"
        and not lowered.problem.savable[lowered.problem.inputs[i][0]]
    ):
        i = lowered.problem.inputs[i][0]
        node = state.index.nodes[lowered.position[i]]
    return i
