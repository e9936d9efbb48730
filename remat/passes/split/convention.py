"""AOTAutograd's calling convention for the forward and the backward graph.

Forward returns its own outputs, then saved tensors, opaque objects, and sizes. Saved tensors whose
version counter autograd checks come before the other saved tensors. Backward takes sizes, saved
tensors, objects, tangents, backward seeds and backward state, in this order. Backward returns one
gradient or None per input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from remat import torch_compat
from remat.graph.joint import UNCHECKED


def write_output(out: fx.Node, values: Sequence[Any], descs: Sequence[Any]) -> None:
    """Set the values that a graph returns, and AOTAutograd's descriptors of these values.

    Args:
        out: the output node of the graph.
        values: the values to return.
        descs: descriptors of the first values: forward's own outputs, or backward's gradients. The
            descriptors of the remaining values, which forward saves, are created here.
    """
    saved = [
        torch_compat.SavedForBackwardsNoVcCheckAOTOutput(k)
        if isinstance(value, fx.Node) and value.meta.get(UNCHECKED, False)
        else torch_compat.SavedForBackwardsAOTOutput(k)
        for k, value in enumerate(values[len(descs) :])
    ]
    out.args = (tuple(values),)
    out.meta["desc"] = [*descs, *saved]
    out.meta["output_stack_traces"] = [
        value.meta.get("stack_trace") if isinstance(value, fx.Node) else None for value in values
    ]


def own_descriptors(out: fx.Node, num_fwd_outputs: int) -> list[Any]:
    """Return AOTAutograd's descriptor of each of forward's own outputs; None for an unknown descriptor."""
    return list(out.meta.get("desc") or [None] * num_fwd_outputs)[:num_fwd_outputs]
