"""AOTAutograd's calling convention, as passes on forward and backward use it.

Forward returns its own outputs, then saved tensors (first those whose version counter autograd
checks), opaque objects, and sizes; backward takes sizes, tensors, objects, then tangents, backward
seeds and backward state, and returns one gradient or None per input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from remat import torch_compat
from remat.graph.joint import UNCHECKED


def write_output(out: fx.Node, values: Sequence[Any], descs: Sequence[Any]) -> None:
    """Makes a graph return values, with AOTAutograd's descriptors of them.

    Args:
        out: the output node of the graph.
        values: what it returns.
        descs: descriptors of its own outputs, or gradients; those of what forward saves follow from
            the values behind them.
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
    """The descriptors of forward's own outputs; None for each without a descriptor."""
    return list(out.meta.get("desc") or [None] * num_fwd_outputs)[:num_fwd_outputs]
