"""Passes over joint graphs, one file each, and the manager that runs them."""

from __future__ import annotations

from typing import Any

from remat.passes.analysis import Analysis
from remat.passes.base import Pass, PassResult, Stage, State
from remat.passes.manager import PassManager

__all__ = [
    "Analysis",
    "Pass",
    "PassManager",
    "PassResult",
    "Stage",
    "State",
    "builtin_analyses",
    "builtin_passes",
]


def builtin_passes() -> list[type[Pass]]:
    """Our own passes, in the order in which the default pipeline runs them."""
    from remat.passes.agree_ranks import AgreeRanks
    from remat.passes.classify import Classify
    from remat.passes.cleanup_recompute_tags import CleanupRecomputeTags
    from remat.passes.control import Fixpoint, Group, Unless, When
    from remat.passes.cse import CommonSubexpressions
    from remat.passes.dce import DeadCode
    from remat.passes.dist_from_backward import DistanceFromBackward
    from remat.passes.functionalize_rng import FunctionalizeRng
    from remat.passes.knapsack import Knapsack
    from remat.passes.min_cut import MinCut
    from remat.passes.partition import Partition
    from remat.passes.raise_getitems import RaiseGetitems
    from remat.passes.reorder_backward import ReorderBackward
    from remat.passes.saved_tensor_hooks import PackSaved
    from remat.passes.solve_graph import SolveGraph

    return [
        DeadCode,
        CommonSubexpressions,
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
        PackSaved,
        Fixpoint,
        When,
        Unless,
        Group,
    ]


def builtin_analyses() -> list[type[Analysis[Any]]]:
    """Our own analyses; those that yield a truth value come last."""
    from remat.passes import analyses, budgeted, min_cut

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
        min_cut.Cut,
        budgeted.LeastDecision,
        budgeted.RegionBudget,
        analyses.Liveness,
        analyses.Differentiable,
        analyses.Random,
        analyses.Mutating,
        analyses.Tagged,
        analyses.DynamicShapes,
        analyses.Partitioned,
    ]
