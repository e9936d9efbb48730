"""Checkpointing by the names of modules: ``checkpoint-layers(match=layers.*)``.

Inside of each layer that matches, everything is recomputed; what one layer hands to the next is
kept. It is what wrapping every layer in ``torch.utils.checkpoint`` does, but without touching the
model, and a solver still decides about everything else.
"""

from __future__ import annotations

import remat

# remat loads this module whenever anything is registered, for a list of solvers too. What needs
# torch is imported where it is asked for.


@remat.hookimpl
def remat_passes():
    """Passes; they can be named in the text of pipelines."""
    from remat_layer_passes.passes import CheckpointLayers

    return [CheckpointLayers]


@remat.hookimpl
def remat_analyses():
    """Analyses, for the list that ``remat passes`` prints."""
    from remat_layer_passes.passes import Layers

    return [Layers]


@remat.hookimpl
def remat_operators():
    """What the planner should know of operators: running sums are as cheap as other reductions."""
    import torch

    from remat.graph.ops import OpTaxonomy

    return OpTaxonomy(recomputable={torch.ops.aten.cumsum, torch.ops.aten.logcumsumexp})
