"""How a solver that knows knapsacks only decides a graph problem.

Its items are the nodes that are worth saving; what it picks is kept from recomputation, and a
minimum cut over plain bytes finds the smallest way to do without recomputing it.
"""

from __future__ import annotations

from dataclasses import replace

from remat.solvers.base import Solver
from remat.solvers.flow import Network
from remat.solvers.graph_problem import GraphProblem, infeasible
from remat.solvers.graph_reduction import reduce_graph
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run
from remat.solvers.solution import GraphSolution
from remat.solvers.verify import verify_graph

#: How often the solver is asked, at most, to fill what the completing cut left of the budget.
ROUNDS = 4


def by_knapsack(
    solver: Solver, problem: GraphProblem, *, time_limit: float | None = None
) -> GraphSolution:
    """Let a knapsack solver decide a graph problem.

    Args:
        solver: whom to ask.
        problem: what to decide, with its capacity.
        time_limit: seconds for each knapsack.

    Raises:
        BudgetError: no decision keeps to the capacity.
        SolverError: as from `remat.solvers.run.run`.
    """
    reduction = reduce_graph(problem)
    core = reduction.core
    capacity = sum(core.size) if problem.capacity is None else problem.capacity
    least = Network(core).cut(core.size)
    least_bytes = sum(core.size[i] for i in least.saved)
    if least_bytes > capacity:
        raise infeasible(capacity, least_bytes)
    items = [
        i
        for i in range(len(core))
        if core.savable[i] and core.recomputable[i] and core.size[i] and core.cost[i]
    ]
    offered = max(0, capacity - least_bytes)
    best = verify_graph(problem, solver, reduction.lift(least.saved))
    elapsed_s, deterministic = 0.0, True
    for _ in range(ROUNDS):
        knapsack = KnapsackProblem(
            weights=tuple(core.size[i] for i in items),
            values=tuple(core.cost[i] for i in items),
            capacity=offered,
        )
        picked = run(solver, knapsack, time_limit=time_limit)
        elapsed_s += picked.elapsed_s
        deterministic &= picked.deterministic
        fixed = [False] * len(core)
        for k in picked.saved:
            fixed[items[k]] = True
        saved = Network(core, fixed=fixed).cut(core.size).saved
        room = capacity - sum(core.size[i] for i in saved)
        if room < 0:
            break
        found = verify_graph(problem, solver, reduction.lift(saved))
        best = min(best, found, key=lambda s: (s.cost, s.saved_bytes))
        if room * 100 < capacity or len(picked.saved) == len(items):
            break
        offered += room
    return replace(best, elapsed_s=elapsed_s, deterministic=deterministic and solver.deterministic)
