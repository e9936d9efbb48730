"""The minimum cuts of a compiler's rules as a solver; costs count only as far as the rules look at them."""

from __future__ import annotations

from typing import ClassVar

from remat.solvers.base import Solver
from remat.solvers.graph_problem import GraphProblem, evaluate, infeasible
from remat.solvers.hull import Hull
from remat.solvers.solution import Answer


class CutSolver(Solver):
    """The first minimum cut that fits: of the compiler's rules, stricter ones first, then of bytes alone.

    The rules ban operators from recomputation, for example reductions. A bare problem knows no
    operators, so the cuts come with it (`GraphProblem.known`). Without them, the solver tries the cut
    that recomputes nothing that costs, then the one that saves the fewest bytes. It proves nothing.
    """

    __slots__ = ()

    name: ClassVar[str] = "cut"
    requires: ClassVar[tuple[str, ...]] = ("ortools", "numpy")

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Decide a graph problem by the first of those cuts that fits."""
        capacity = sum(problem.size) if problem.capacity is None else problem.capacity
        for saved in problem.known:
            if evaluate(problem, saved).saved_bytes <= capacity:
                return Answer(saved)
        hull = Hull.of(problem)
        if capacity < hull.least_bytes:
            raise infeasible(capacity, hull.least_bytes)
        vertices = () if problem.known else (hull.ends[1],)
        fits = next((v for v in vertices if v.saved_bytes <= capacity), hull.ends[0])
        return Answer(hull.reduction.invert(fits.saved))
