"""Register remat's own solvers, passes, analyses and cost models through the hooks for plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.plugins.hooks import hookimpl

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.passes.core.base import Pass
    from remat.passes.core.state import Analysis
    from remat.solvers.base import Solver


@hookimpl
def remat_solvers() -> list[type[Solver]]:
    """Return remat's own solver classes, in the order in which tables list them."""
    from remat.solvers.auto import Auto
    from remat.solvers.cpsat import CpSat
    from remat.solvers.cut import CutSolver
    from remat.solvers.dp import DynamicProgram
    from remat.solvers.frontier import DynamicMemoryBudget
    from remat.solvers.graph_milp import GraphMilp
    from remat.solvers.greedy import Greedy
    from remat.solvers.lagrangian import Lagrangian
    from remat.solvers.milp import Milp
    from remat.solvers.native import Native
    from remat.solvers.pulp_cbc import PulpCbc

    return [
        Greedy,
        DynamicProgram,
        Native,
        Milp,
        PulpCbc,
        CpSat,
        DynamicMemoryBudget,
        CutSolver,
        Lagrangian,
        GraphMilp,
        Auto,
    ]


@hookimpl
def remat_passes() -> list[type[Pass]]:
    """Return remat's own pass classes; this call imports torch."""
    from remat.passes.builtin import builtin_passes

    return list(builtin_passes())


@hookimpl
def remat_analyses() -> list[type[Analysis[Any]]]:
    """Return remat's own analysis classes; this call imports torch."""
    from remat.passes.builtin import builtin_analyses

    return builtin_analyses()


@hookimpl
def remat_cost_models() -> list[type[CostModel]]:
    """Return remat's own cost model classes; this call imports torch."""
    from remat.graph.costs import builtin_cost_models

    return list(builtin_cost_models())
