"""The hooks through which solvers, passes and cost models come in, ours and anyone's.

A plugin is a module named by an entry point of the group ``remat``::

    @remat.hookimpl
    def remat_solvers():
        return [Mine]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.passes.base import Pass
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
def remat_cost_models() -> list[type[CostModel]]:  # type: ignore[empty-body]
    """Return cost model classes. Asked for only when cost models are wanted."""
