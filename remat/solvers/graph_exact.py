"""The graph problem to optimality, by enumerating every decision that could be better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.solvers.base import Solver
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.kernel import missing
from remat.solvers.lagrangian import Search
from remat.solvers.solution import Answer


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraphExact(Solver):
    """All decisions within the gap of the hull, by dynamic programming over the graph, in C++.

    Attributes:
        work: of one search, in units of the kernel; a hundred million take a second or three.
    """

    work: int = 1_000_000_000

    name: ClassVar[str] = "graph-exact"
    requires: ClassVar[tuple[str, ...]] = ("ortools", "numpy")

    @classmethod
    def cannot_run(cls) -> str | None:
        return missing()

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Decide a graph problem; the answer's bound is a lower bound on the cost."""
        search = Search(problem, time_limit=time_limit)
        return search.answer(
            search.exact(search.repair(search.start()), work=self.work, tolerance=0.0)
        )
