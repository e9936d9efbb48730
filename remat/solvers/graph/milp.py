"""Solve the graph problem as a mixed-integer program with HiGHS.

For each node, a binary variable says whether the node is saved, and a second variable whether the
node is recomputed. The recompute variables may be continuous, because their values follow from the
save variables. A constraint excludes decisions that cost more than the best known decision.

The lower convex hull of the problem makes the program smaller. The hull gives a lower bound on the cost and a price of
a byte (see `remat.solvers.graph.hull`). A choice saves or recomputes one node. The *loss* of a choice is how much the
choice raises the lower bound on the cost, computed at the price of a byte. No decision better than the best known one
contains a choice whose loss exceeds the gap between the best cost and the bound. The variables of choices with a loss
above the gap are fixed to 0.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from remat.solvers.base import Solver
from remat.solvers.effort import EFFORT
from remat.solvers.graph.lagrangian import Incumbent, Search
from remat.solvers.graph.problem import GraphProblem, evaluate
from remat.solvers.highs import milp
from remat.solvers.solution import Answer

#: HiGHS's bound is lowered by this fraction, because HiGHS computes in floating point, with
#: tolerances of 1e-6 on scaled rows.
_MARGIN = 2e-6


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraphMilp(Solver):
    """Solver that runs HiGHS on the graph problem, after a Lagrangian bound has fixed as many variables as it can.

    Attributes:
        nodes: the most branch-and-bound nodes to open if there is no time limit.
        gap: the difference between cost and lower bound at which to stop, as a fraction of the
            cost.
    """

    nodes: int = 2_000
    gap: float = EFFORT.gap / 2

    name: ClassVar[str] = "graph-milp"
    requires: ClassVar[tuple[str, ...]] = ("scipy", "numpy")

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Choose the nodes to save; the answer also has a lower bound on the cost of any decision."""
        search = Search(problem, time_limit=time_limit)
        return search.answer(self.improve(search, search.repair(search.start())))

    def improve(self, search: Search, best: Incumbent) -> Incumbent:
        """Run HiGHS, and return the cheaper of HiGHS's decision and ``best``, with the tighter of both bounds."""
        if best.gap <= self.gap or search.late():
            return best
        program, unit = _program(search, best)
        left = None if search.deadline is None else max(0.1, search.deadline - time.monotonic())
        result = milp(**program, gap=self.gap, nodes=self.nodes, time_limit=left)
        bound = best.bound
        if math.isfinite(result.bound):
            dual = result.bound - _MARGIN * max(1.0, abs(result.bound))
            bound = max(bound, min(best.cost, math.ceil(dual * unit)))  # costs are integers
        elif result.infeasible:  # no decision costs less than the best known one
            bound = best.cost
        saved, cost = best.saved, best.cost
        if result.x is not None:
            evaluation = evaluate(
                search.core, [i for i in range(len(search.core)) if result.x[i] > 0.5]
            )
            fits = evaluation.saved_bytes <= search.capacity
            if fits and (evaluation.recompute_cost, evaluation.saved_bytes) < (cost, 2**63):
                saved, cost = evaluation.saved, evaluation.recompute_cost
        by_clock = best.by_clock or result.by_clock
        return Incumbent(saved=saved, cost=cost, bound=min(bound, cost), by_clock=by_clock)


def _program(search: Search, best: Incumbent) -> tuple[dict[str, Any], float]:
    """Return the arguments of `milp` for a graph problem, and the cost for which one unit of the objective stands."""
    import numpy as np
    from scipy.sparse import csr_matrix

    # The columns are the save variables of all nodes, then the recompute variables of all nodes.
    core = search.core
    n = len(core)
    losses, edge = search.hull.losses(search.edge), search.edge
    most_loss = best.cost * edge.scale + edge.price * search.capacity - edge.value
    may_save = [core.savable[i] and losses.save[i] <= most_loss for i in range(n)]
    may_again = [core.recomputable[i] and losses.recompute[i] <= most_loss for i in range(n)]
    # HiGHS's tolerances are absolute, so costs and bytes are scaled to about a thousand.
    unit = max(1.0, best.cost / 1e3)
    scale = max(1.0, search.capacity / 1e3)
    size = np.asarray(core.size, dtype=np.float64) / scale
    objective = np.concatenate([np.zeros(n), np.asarray(core.cost, dtype=np.float64) / unit])
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    low: list[float] = []

    def row(entries: list[tuple[int, float]], least: float) -> None:
        rows.extend([len(low)] * len(entries))
        columns.extend(j for j, _ in entries)
        values.extend(v for _, v in entries)
        low.append(least)

    for i in core.needed:
        row([(i, 1.0), (n + i, 1.0)], 1.0)
    for i, reads in enumerate(core.inputs):
        for j in reads if may_again[i] else ():
            row([(j, 1.0), (n + j, 1.0), (n + i, -1.0)], 0.0)
    row([(i, -float(size[i])) for i in range(n) if may_save[i]], -search.capacity / scale)
    # Exclude decisions that cost more than the best known one.
    row([(n + i, -float(c)) for i, c in enumerate(objective[n:]) if c], -best.cost / unit)
    matrix = csr_matrix((values, (rows, columns)), shape=(len(low), 2 * n))
    program = {
        "cost": objective,
        "rows": matrix,
        "low": low,
        "upper": [*may_save, *may_again],
        # Recompute variables are continuous: the optimum is the same, with fewer variables to branch on.
        "integral": [True] * n + [False] * n,
    }
    return program, unit
