"""The decision under a memory budget on the whole graph, by a solver of graph problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.passes.decide.budgeted import Budgeted


@dataclass(frozen=True)
class SolveGraph(Budgeted):
    """Keeps the saved bytes within a budget at the least cost that a solver finds on the graph."""

    name: ClassVar[str] = "solve-graph"
    summary: ClassVar[str] = "keep the saved bytes within a budget, on the whole graph"
