"""Decide what a PyTorch training step saves for backward and what it recomputes.

Every public name is imported on first use. ``import remat`` therefore imports neither torch nor a
solver library.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from remat.lazy import names_for_types
from remat.version import __version__ as __version__

if TYPE_CHECKING:
    from remat import sac as sac
    from remat.api import default_pipeline as default_pipeline
    from remat.api import frontier as frontier
    from remat.api import graph_pass as graph_pass
    from remat.api import instance as instance
    from remat.api import knapsack_fn as knapsack_fn
    from remat.api import plan as plan
    from remat.api import rematerialize as rematerialize
    from remat.api import solve as solve
    from remat.api import solver_names as solver_names
    from remat.errors import PeakWarning as PeakWarning
    from remat.errors import RematError as RematError
    from remat.experiments.grid import compare as compare
    from remat.experiments.grid import sweep as sweep
    from remat.fitting.fit import fit as fit
    from remat.fitting.table import Fit as Fit
    from remat.fitting.table import FitRow as FitRow
    from remat.graph.capture.step import capture as capture
    from remat.graph.joint import JointGraph as JointGraph
    from remat.graph.policies import region as region
    from remat.graph.problems.knapsack_evaluator import GraphInfoProvider as GraphInfoProvider
    from remat.graph.problems.knapsack_evaluator import KnapsackEvaluator as KnapsackEvaluator
    from remat.graph.purity import declare_pure as declare_pure
    from remat.graph.purity import undeclare_pure as undeclare_pure
    from remat.graph.whole_graph import whole_graph as whole_graph
    from remat.integrations.backend import backend as backend
    from remat.integrations.compile_log import plans as plans
    from remat.integrations.partitioner import partitioner as partitioner
    from remat.integrations.torch_knapsack import torch_solver as torch_solver
    from remat.passes.core.base import Pass as Pass
    from remat.passes.core.state import Analysis as Analysis
    from remat.passes.packing.pairs import SavedTensorHooks as SavedTensorHooks
    from remat.planning.pipelines import PassManager as PassManager
    from remat.planning.plan import Plan as Plan
    from remat.planning.plan_set import PlanSet as PlanSet
    from remat.plugins.hooks import hookimpl as hookimpl
    from remat.reduction import Reduced as Reduced
    from remat.reduction import reduce as reduce
    from remat.solvers.base import Solver as Solver
    from remat.solvers.graph.problem import GraphProblem as GraphProblem
    from remat.solvers.instances.instance import Instance as Instance
    from remat.solvers.instances.instance import load_instance as load_instance
    from remat.solvers.instances.instance import save_instance as save_instance
    from remat.solvers.problem import KnapsackProblem as KnapsackProblem
    from remat.solvers.schedule.problem import ScheduleProblem as ScheduleProblem
    from remat.solvers.solution import Answer as Answer
    from remat.solvers.solution import Schedule as Schedule
    from remat.solvers.solution import ScheduleAnswer as ScheduleAnswer
    from remat.solvers.solution import Solution as Solution
    from remat.solvers.solution import Status as Status
    from remat.units import Peak as Peak
    from remat.units import Saved as Saved

#: Dict from each public name to its import path, such as ``remat.api:plan``.
_HOMES = names_for_types(__file__)

#: Names of public submodules, such as ``sac`` in ``remat.sac.apply``, which are imported on first use.
_MODULES = ("checkpointing", "sac")

__all__ = sorted({*_HOMES, *_MODULES, "__version__"})


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _MODULES:
        return importlib.import_module(f"remat.{name}")
    if name not in _HOMES:
        # With `obj`, a traceback suggests the nearest name.
        raise AttributeError(
            f"module 'remat' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    # A module-level ``__getattr__`` runs only for missing names: the next access skips this function.
    module, _, own = _HOMES[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), own)
    return value


def __dir__() -> list[str]:
    return list(__all__)
