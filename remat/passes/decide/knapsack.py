"""The decision under a memory budget by a knapsack over the expensive operators; a cut decides the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.passes.decide.budgeted import Budgeted


@dataclass(frozen=True)
class Knapsack(Budgeted):
    """Keeps the saved bytes within a budget, as `remat.solvers.completion` does it."""

    name: ClassVar[str] = "knapsack"
    summary: ClassVar[str] = "keep the saved bytes within a budget, by any solver"
    knapsack: ClassVar[bool] = True
