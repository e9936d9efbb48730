"""How a knapsack solver decides a graph problem.

The items are the nodes worth saving. What the solver picks must not be recomputed, and a minimum cut
over bytes finds the smallest way to achieve that. Saving just what was picked is one such cut, so the
capacity holds whatever the solver answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from remat.solvers.base import Solver
from remat.solvers.flow import Network
from remat.solvers.graph_problem import GraphProblem, evaluate, infeasible
from remat.solvers.graph_reduction import reduce_graph
from remat.solvers.problem import KnapsackProblem
from remat.solvers.solution import GraphSolution, Solution
from remat.solvers.verify import verify

#: How often the solver is asked, at most, to fill what the completing cut left of the budget.
ROUNDS = 4


def by_knapsack(
    solver: Solver, problem: GraphProblem, pick: Callable[[KnapsackProblem], Solution]
) -> GraphSolution:
    """Let a knapsack solver decide a graph problem.

    The items are all nodes of the problem's core that cost something. Where the problem knows decisions,
    the nodes that one of them does not recompute are tried as a second set of items: what a compiler's
    rules take for expensive is often the better choice. The answer is the cheapest decision of all.

    Args:
        solver: whom to ask.
        problem: what to decide, with its capacity.
        pick: has the solver decide a knapsack.

    Raises:
        BudgetError: no decision keeps to the capacity.
        SolverError: as from `remat.solvers.run.run`.
    """
    reduction = reduce_graph(problem)
    core = reduction.core
    capacity = sum(problem.size) if problem.capacity is None else problem.capacity
    least = Network(core).cut(core.size).saved
    least_bytes = sum(core.size[i] for i in least)
    if least_bytes > capacity:
        raise infeasible(capacity, least_bytes)
    scored = [(d, evaluate(problem, d)) for d in problem.known]
    fitting = [d for d, e in scored if e.saved_bytes <= capacity]
    found = [verify(problem, solver, d) for d in (reduction.invert(least), *fitting)]
    weight = _weights(core)
    items = [i for i in range(len(core)) if core.cost[i] and weight[i]]
    sets = [items]
    if scored:  # where a decision fits, its like in stricter rules is the aim
        again = set(scored[0 if fitting else -1][1].recomputed)
        sets.append([i for i in items if reduction.kept[i] not in again])
    elapsed_s, deterministic = 0.0, True
    for chosen in sets:
        if min(f.cost for f in found) == 0:
            break
        for picked, saved in _rounds(pick, core, chosen, weight, capacity, capacity - least_bytes):
            elapsed_s += picked.elapsed_s
            deterministic &= picked.deterministic
            if saved is not None:
                found.append(verify(problem, solver, reduction.invert(saved)))
    best = min(found, key=lambda s: (s.cost, s.saved_bytes, s.saved))
    return replace(best, elapsed_s=elapsed_s, deterministic=deterministic and solver.deterministic)


def _rounds(
    pick: Callable[[KnapsackProblem], Solution],
    core: GraphProblem,
    items: list[int],
    weight: list[int],
    capacity: int,
    offered: int,
) -> Iterator[tuple[Solution, tuple[int, ...] | None]]:
    """A solver's choice, completed by the cut; None if the completed decision exceeds the capacity.

    The completing cut often finds something smaller than what was picked; the room that leaves is
    offered to the solver again, a few times.
    """
    for _ in range(ROUNDS):
        knapsack = KnapsackProblem(
            weights=tuple(weight[i] for i in items),
            values=tuple(core.cost[i] for i in items),
            capacity=offered,
        )
        picked = pick(knapsack)
        fixed = [False] * len(core)
        for k in picked.saved:
            fixed[items[k]] = True
        saved = Network(core, fixed=fixed).cut(core.size).saved
        room = capacity - sum(core.size[i] for i in saved)
        yield picked, saved if room >= 0 else None
        if room < 0 or room * 100 < capacity or len(picked.saved) == len(items):
            return
        offered += room


def _weights(core: GraphProblem) -> list[int]:
    """Upper bound on the bytes that spare each node its recomputation; 0 if none can.

    Its own, where it can be saved; otherwise, as for an operator of several results, those of all
    that is computed from it.
    """
    readers: list[list[int]] = [[] for _ in core.names]
    for i, reads in enumerate(core.inputs):
        for j in reads:
            readers[j].append(i)
    needed = set(core.needed)
    weight = [0] * len(core)
    for i in range(len(core) - 1, -1, -1):
        if core.savable[i]:
            weight[i] = core.size[i]
        elif i not in needed and all(weight[r] for r in readers[i]):
            weight[i] = sum(weight[r] for r in readers[i])
    return [w if core.recomputable[i] else 0 for i, w in enumerate(weight)]
