"""Let a solver that solves only knapsacks choose the nodes to save in a graph problem.

The items of the knapsack are the nodes that cost something to recompute. The items that the solver picks must not be
recomputed. A minimum cut over bytes finds the decision that saves the fewest bytes and recomputes no picked item. The
minimum cut saves at most B more bytes than the picked items weigh, where B is the fewest bytes that any decision saves.
Therefore the first knapsack's capacity is the problem's capacity minus the fewest bytes that any decision saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from remat.solvers.base import Solver
from remat.solvers.effort import EFFORT
from remat.solvers.graph.flow import Network
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.problem import GraphProblem, evaluate
from remat.solvers.problem import KnapsackProblem
from remat.solvers.solution import GraphSolution, Solution
from remat.solvers.verify import verify


def by_knapsack(
    solver: Solver, problem: GraphProblem, pick: Callable[[KnapsackProblem], Solution]
) -> GraphSolution:
    """Let a knapsack solver choose the nodes to save, and return the cheapest choice found.

    The solver first solves knapsacks whose items are all nodes of the reduced problem that cost something to recompute.
    If ``problem.hints`` has decisions, the solver then solves knapsacks without the nodes that one of the hints
    recomputes. The hints follow a compiler's rules, which save expensive nodes. Saving an expensive node often avoids
    more cost per byte than saving a cheap node.

    Args:
        solver: the knapsack solver; the solution and errors name it.
        problem: the graph problem, with its capacity.
        pick: a function that runs ``solver`` on a knapsack and returns the verified solution.

    Raises:
        BudgetError: every decision saves more bytes than the capacity.
        SolverError: the solver fails; see `remat.solvers.run.run`.
    """
    hull = Hull.of(problem)
    reduction, core, least_bytes = hull.reduction, hull.core, hull.least_bytes
    capacity = sum(problem.size) if problem.capacity is None else problem.capacity
    hull.check_capacity(capacity)
    scored = [(d, evaluate(problem, d)) for d in problem.hints]
    fitting = [d for d, e in scored if e.saved_bytes <= capacity]
    # The cut of fewest bytes fits if any decision fits, so `solutions` is never empty.
    solutions = [verify(problem, solver, d) for d in (reduction.invert(hull.least.saved), *fitting)]
    weight = _weights(core)
    items = [i for i in range(len(core)) if core.cost[i] and weight[i]]
    sets = [items]
    if scored:
        # `hints` starts with the strictest rules, which recompute least. If any known decision fits, leave
        # out the nodes that the strictest one recomputes, although that one may not fit. If none fits,
        # leave out those of the loosest one.
        again = set(scored[0 if fitting else -1][1].recomputed)
        sets.append([i for i in items if reduction.remaining[i] not in again])
    elapsed_s, deterministic = 0.0, True
    for chosen in sets:
        if min(f.cost for f in solutions) == 0:
            break
        for picked, saved in _rounds(pick, core, chosen, weight, capacity, capacity - least_bytes):
            elapsed_s += picked.elapsed_s
            deterministic &= picked.deterministic
            if saved is not None:
                solutions.append(verify(problem, solver, reduction.invert(saved)))
    best = min(solutions, key=lambda s: (s.cost, s.saved_bytes, s.saved))
    return replace(best, elapsed_s=elapsed_s, deterministic=deterministic and solver.deterministic)


def _rounds(
    pick: Callable[[KnapsackProblem], Solution],
    core: GraphProblem,
    items: list[int],
    weight: list[int],
    capacity: int,
    offered: int,
) -> Iterator[tuple[Solution, tuple[int, ...] | None]]:
    """Yield each knapsack's solution and the nodes that a minimum cut then saves, or None if the nodes do not fit."""
    # The minimum cut often saves fewer bytes than the picked items weigh. The next knapsack gets the bytes left over.
    for _ in range(EFFORT.rounds):
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
        # Stop if all items were picked, or if less than 1 % of the capacity is left: another round
        # could hardly gain anything.
        if room < 0 or room * 100 < capacity or len(picked.saved) == len(items):
            return
        offered += room


def _weights(core: GraphProblem) -> list[int]:
    """Return, for each node, the bytes that must be saved to avoid its recomputation; 0 if saving avoids nothing."""
    readers: list[list[int]] = [[] for _ in core.names]
    for i, reads in enumerate(core.inputs):
        for j in reads:
            readers[j].append(i)
    needed = set(core.needed)
    weight = [0] * len(core)
    for i in range(len(core) - 1, -1, -1):
        if core.savable[i]:
            weight[i] = core.size[i]
        # Saving all readers of a node that cannot be saved, such as one with several results, avoids its run.
        elif i not in needed and all(weight[r] for r in readers[i]):
            weight[i] = sum(weight[r] for r in readers[i])
    return [w if core.recomputable[i] else 0 for i, w in enumerate(weight)]
