"""AOTAutograd's calling convention for the forward and the backward graph.

Forward returns its own outputs, then saved tensors, opaque objects, and sizes. Saved tensors whose version counter
autograd checks come before the other saved tensors. Backward takes sizes, saved tensors, opaque objects, tangents,
backward seeds and backward state, in this order. Backward returns one gradient or None per input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx

from remat import torch_compat
from remat.graph.joint import UNCHECKED, SavedValueKind, output_node, outputs_of


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


def hand_over(
    forward: fx.Graph, backward: fx.Graph, own: int, values: Sequence[fx.Node], suffix: str = ""
) -> list[fx.Node]:
    """Make forward hand further tensors over to backward; return the new placeholders of backward.

    Args:
        forward: the forward graph.
        backward: the backward graph.
        own: number of forward's own outputs.
        values: the nodes of the tensors in forward.
        suffix: text that the name of a placeholder has after the name of its tensor.
    """
    out, outputs = output_node(forward), outputs_of(forward)
    kinds = Counter(
        SavedValueKind.of(v) if isinstance(v, fx.Node) else SavedValueKind.SIZE
        for v in outputs[own:]
    )
    # After the tensors whose version counters autograd checks; backward takes sizes before these tensors.
    checked = kinds[SavedValueKind.TENSOR]
    at, before = own + checked, list(backward.nodes)[kinds[SavedValueKind.SIZE] + checked]
    write_output(out, [*outputs[:at], *values, *outputs[at:]], own_descriptors(out, own))
    with backward.inserting_before(before):
        taken = [backward.placeholder(f"{value.name}{suffix}") for value in values]
    for value, placeholder in zip(values, taken, strict=True):
        placeholder.meta = {"val": value.meta["val"]}
    return taken


def own_descriptors(out: fx.Node, num_fwd_outputs: int) -> list[Any]:
    """Return AOTAutograd's descriptor of each of forward's own outputs; None for an unknown descriptor."""
    return list(out.meta.get("desc") or [None] * num_fwd_outputs)[:num_fwd_outputs]
