"""Define the hooks by which remat and plugins register solvers, passes, analyses, operators and cost models.

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
    """Return a plugin's solver classes; a solver's method ``solve``, not this hook, imports the solver's libraries."""


@hookspec
def remat_passes() -> list[type[Pass]]:  # type: ignore[empty-body]
    """Return a plugin's pass classes. The hook may import torch, because remat calls it only if passes are needed."""


@hookspec
def remat_analyses() -> list[type[Analysis[Any]]]:  # type: ignore[empty-body]
    """Return a plugin's analysis classes, which the command ``remat passes`` lists."""


@hookspec
def remat_operators() -> OpTaxonomy:  # type: ignore[empty-body]
    """Return a plugin's `OpTaxonomy`, which declares properties of custom operators to the planner.

    Without a declaration, a plan does not recompute a custom operator: the operator runs exactly as
    often as the step calls it.
    ``OpTaxonomy(pure={torch.ops.mine.attention})`` declares that the operator may run again, as
    `remat.declare_pure` does.
    """


@hookspec
def remat_cost_models() -> list[type[CostModel]]:  # type: ignore[empty-body]
    """Return a plugin's cost model classes. remat calls this hook only if cost models are needed."""
