"""The passes and analyses that come with remat."""

from __future__ import annotations

from typing import Any

from remat.passes.core.base import Pass
from remat.passes.core.state import Analysis


def builtin_passes() -> list[type[Pass]]:
    """Return remat's own pass classes, in the order of the ``remat passes`` table."""
    from remat.passes.core.control import Fixpoint
    from remat.passes.decide.knapsack import Knapsack
    from remat.passes.decide.min_cut import MinCut
    from remat.passes.decide.solve_graph import SolveGraph
    from remat.passes.hooks.offload_saved import OffloadSaved
    from remat.passes.hooks.saved_tensor_hooks import PackSaved
    from remat.passes.joint.chunk_loss import ChunkLoss
    from remat.passes.joint.classify import Classify
    from remat.passes.joint.cleanup_recompute_tags import CleanupRecomputeTags
    from remat.passes.joint.cse import CommonSubexpressions
    from remat.passes.joint.dce import DeadCode
    from remat.passes.joint.dist_from_backward import DistanceFromBackward
    from remat.passes.ranks.agree_ranks import AgreeRanks
    from remat.passes.split.functionalize_rng import FunctionalizeRng
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
        Fixpoint,
    ]


def builtin_analyses() -> list[type[Analysis[Any]]]:
    """Return remat's own analysis classes, in the order of the ``remat passes`` table."""
    from remat.passes.core import analyses
    from remat.passes.decide import budgeted, min_cut

    return [
        analyses.Positions,
        analyses.Classification,
        analyses.Distances,
        analyses.Memory,
        analyses.Costs,
        analyses.GraphProblemOf,
        min_cut.Fusibility,
        min_cut.Banned,
        min_cut.Weights,
        min_cut.RuntimeOptimalCut,
        budgeted.LeastDecision,
        budgeted.RegionBudget,
        analyses.Liveness,
    ]
