"""Solve a graph problem by minimum cuts under a compiler's rules: take the first cut that fits the capacity.

The cuts are tried in a fixed order, from the strictest rules to the loosest, and their costs are not compared.
"""

from __future__ import annotations

from typing import ClassVar

from remat.solvers.base import Solver
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.problem import GraphProblem, evaluate
from remat.solvers.solution import Answer


class CutSolver(Solver):
    """Solver that tries minimum cuts under ever looser compiler rules, and returns the first that fits the capacity.

    A compiler's rules forbid the recomputation of some operators, such as reductions. A `GraphProblem` has no
    operators, so the caller puts the minimum cuts into ``hints``, with the cuts under the strictest rules first. The
    solver proves no bound.
    """

    __slots__ = ()

    name: ClassVar[str] = "cut"
    requires: ClassVar[tuple[str, ...]] = ("scipy", "numpy")

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Return the first of the candidate cuts whose saved bytes fit the capacity."""
        capacity = sum(problem.size) if problem.capacity is None else problem.capacity
        for saved in problem.hints:
            if evaluate(problem, saved).saved_bytes <= capacity:
                return Answer(saved)
        hull = Hull.of(problem)
        hull.check_capacity(capacity)
        fewest, cheapest = hull.ends
        # If `hints` has cuts and none fits, only the cut of fewest bytes is left.
        free = not problem.hints and cheapest.saved_bytes <= capacity
        return Answer(hull.reduction.invert((cheapest if free else fewest).saved))
