"""Pass that chooses the saved values of the whole graph within a budget, by a graph-problem solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.passes.decide.budgeted import Budgeted


@dataclass(frozen=True)
class SolveGraph(Budgeted):
    """Keep the saved bytes within a budget at the least recompute cost that a solver finds."""

    name: ClassVar[str] = "solve-graph"
    summary: ClassVar[str] = "keep the saved bytes within a budget, on the whole graph"
