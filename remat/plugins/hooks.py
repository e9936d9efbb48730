"""The hooks that register solvers, passes, analyses, operators and cost models, ours and anyone's.

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
    """Return solver classes. Import their back ends in ``solve``, not here."""


@hookspec
def remat_passes() -> list[type[Pass]]:  # type: ignore[empty-body]
    """Return pass classes. Asked for only when passes are wanted, so torch may be imported."""


@hookspec
def remat_analyses() -> list[type[Analysis[Any]]]:  # type: ignore[empty-body]
    """Return analysis classes, to be listed by ``remat passes``."""


@hookspec
def remat_operators() -> OpTaxonomy:  # type: ignore[empty-body]
    """Return what the planner should know about operators of yours; see `remat.graph.ops`.

    An operator that it does not name runs once a step: ``OpTaxonomy(pure={torch.ops.mine.attention})``
    says that it may run again, as `remat.declare_pure` does.
    """


@hookspec
def remat_cost_models() -> list[type[CostModel]]:  # type: ignore[empty-body]
    """Return cost model classes. Asked for only when cost models are wanted."""
