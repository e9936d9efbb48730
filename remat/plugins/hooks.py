"""Hooks by which remat and plugins register solvers, passes, analyses, operators and cost models.

A plugin is a module named by an entry point of the group ``remat``::

    @remat.hookimpl
    def remat_solvers():
        return [Mine]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.graph.ops import OpTaxonomy
    from remat.passes.core.base import Pass
    from remat.passes.core.state import Analysis
    from remat.solvers.base import Solver

PROJECT = "remat"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def remat_solvers() -> list[type[Solver]]:  # type: ignore[empty-body]
    """Return solver classes. Import a solver's libraries in its method ``solve``, not in this hook."""


@hookspec
def remat_passes() -> list[type[Pass]]:  # type: ignore[empty-body]
    """Return pass classes. A plugin may import torch in this hook, because remat calls it only if passes are needed."""


@hookspec
def remat_analyses() -> list[type[Analysis[Any]]]:  # type: ignore[empty-body]
    """Return analysis classes, which the command ``remat passes`` lists."""


@hookspec
def remat_operators() -> OpTaxonomy:  # type: ignore[empty-body]
    """Return an `OpTaxonomy` that declares properties of custom operators to the planner.

    Without a declaration, a plan does not recompute a custom operator: the operator runs exactly as
    often as the step calls it.
    ``OpTaxonomy(pure={torch.ops.mine.attention})`` declares that the operator may run again, as
    `remat.declare_pure` does.
    """


@hookspec
def remat_cost_models() -> list[type[CostModel]]:  # type: ignore[empty-body]
    """Return cost model classes. remat calls the hook for cost models only if cost models are needed."""
