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
    """Return remat's own solver classes, in the order in which tables list the solvers."""
    # Imported here, because `import remat` must not wait for modules that only a solver needs.
    from remat.solvers.auto import Auto
    from remat.solvers.graph.cut import CutSolver
    from remat.solvers.graph.lagrangian import Lagrangian
    from remat.solvers.graph.milp import GraphMilp
    from remat.solvers.knapsack.cpsat import CpSat
    from remat.solvers.knapsack.dp import DynamicProgram
    from remat.solvers.knapsack.frontier import DynamicMemoryBudget
    from remat.solvers.knapsack.greedy import Greedy
    from remat.solvers.knapsack.milp import Milp
    from remat.solvers.knapsack.native import Native
    from remat.solvers.knapsack.pulp_cbc import PulpCbc

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
    """Return remat's own pass classes, in the order that ``remat passes`` prints.

    Calling this function imports torch.
    """
    # Imported here, because passes import torch, and solvers are listed without torch.
    from remat.passes.core.control import Fixpoint
    from remat.passes.decide.budgeted import Knapsack, SolveGraph
    from remat.passes.decide.min_cut import MinCut
    from remat.passes.hooks.offload_saved import OffloadSaved
    from remat.passes.hooks.saved_tensor_hooks import PackSaved
    from remat.passes.joint.chunk_loss import ChunkLoss
    from remat.passes.joint.classify import Classify, DistanceFromBackward
    from remat.passes.joint.cleanup_recompute_tags import CleanupRecomputeTags
    from remat.passes.joint.cse import CommonSubexpressions
    from remat.passes.joint.dce import DeadCode
    from remat.passes.ranks.agree_ranks import AgreeRanks
    from remat.passes.split.functionalize_rng import FunctionalizeRng
    from remat.passes.split.join import Join
    from remat.passes.split.partition import Partition
    from remat.passes.split.raise_getitems import RaiseGetitems
    from remat.passes.split.reorder_backward import ReorderBackward

    return [
        DeadCode,
        CommonSubexpressions,
        ChunkLoss,
        CleanupRecomputeTags,
        Classify,
        DistanceFromBackward,
        MinCut,
        Knapsack,
        SolveGraph,
        AgreeRanks,
        Partition,
        FunctionalizeRng,
        ReorderBackward,
        RaiseGetitems,
        OffloadSaved,
        PackSaved,
        Join,
        Fixpoint,
    ]


@hookimpl
def remat_analyses() -> list[type[Analysis[Any]]]:
    """Return remat's own analysis classes, in the order that ``remat passes`` prints.

    Calling this function imports torch.
    """
    from remat.passes.core import state
    from remat.passes.decide import budgeted, min_cut

    return [
        state.Positions,
        state.Classification,
        state.Distances,
        state.Memory,
        state.Costs,
        state.GraphProblemOf,
        min_cut.Fusibility,
        min_cut.RuntimeOptimalCut,
        budgeted.LeastDecision,
        budgeted.RegionBudget,
    ]


@hookimpl
def remat_cost_models() -> list[type[CostModel]]:
    """Return remat's own cost model classes; calling this function imports torch."""
    from remat.graph.costs import builtin_cost_models

    return list(builtin_cost_models())
