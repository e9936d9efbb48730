"""Pass that lets a solver choose, over the whole graph, the values to save within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.passes.decide.budgeted import Budgeted


@dataclass(frozen=True)
class SolveGraph(Budgeted):
    """Keep the saved bytes within a budget at the least recompute cost that a solver finds.

    The solver decides on all nodes of the graph problem together. A solver that only solves
    knapsack problems is used as in the pass `Knapsack`.
    """

    name: ClassVar[str] = "solve-graph"
    summary: ClassVar[str] = "keep the saved bytes within a budget, on the whole graph"
