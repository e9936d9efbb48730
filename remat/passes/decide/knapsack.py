"""Pass that solves a knapsack and a minimum cut to choose the saved values within a memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.passes.decide.budgeted import Budgeted


@dataclass(frozen=True)
class Knapsack(Budgeted):
    """Keep the saved bytes within a budget: solve a knapsack of the operators that cost time to recompute.

    The solver picks the operators that must not be recomputed. A minimum cut then finds the fewest
    bytes to save so that no picked operator is recomputed; see `remat.solvers.graph.completion`.
    """

    name: ClassVar[str] = "knapsack"
    summary: ClassVar[str] = "keep the saved bytes within a budget, by any solver"
    knapsack: ClassVar[bool] = True
