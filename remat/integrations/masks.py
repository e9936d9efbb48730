"""Masks handed from forward to backward as bytes of 0 and 1, where Inductor writes C++.

PyTorch 2.13 to 2.15 do not vectorise reading and writing of booleans in memory on a CPU: a relu of two million elements
that also writes its mask took 20 ms instead of 0.5 ms. As ``uint8``, converted by way of ``float32``, the same mask
costs nothing one could measure, and it takes as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.joint import outputs_of


def masks_to_bytes(graph: fx.Graph, own: int) -> frozenset[str]:
    """Has forward return its masks as bytes; returns the names of those.

    Args:
        graph: forward; it is changed.
        own: how many of its outputs are the step's own, which stay as they are.
    """
    returned = outputs_of(graph)
    kept = {v for v in returned[:own] if isinstance(v, fx.Node)}
    masks = dict.fromkeys(
        v for v in returned[own:] if isinstance(v, fx.Node) and v not in kept and _is_mask(v)
    )
    output = graph.output_node()
    for mask in masks:
        with graph.inserting_before(output):
            packed = _converted(graph, _converted(graph, mask, torch.float32), torch.uint8)
        output.replace_input_with(mask, packed)
    return frozenset(m.name for m in masks)


def masks_from_bytes(graph: fx.Graph, inputs: Sequence[Any], names: Iterable[str]) -> Sequence[Any]:
    """Has backward take masks as bytes; returns what it is compiled for then.

    Args:
        graph: backward; it is changed.
        inputs: what it is compiled for.
        names: the masks, as `masks_to_bytes` returned them.
    """
    wanted, given = frozenset(names), list(inputs)
    for k, node in enumerate(graph.find_nodes(op="placeholder")):
        if node.name not in wanted:
            continue
        users = list(node.users)
        node.meta["val"] = node.meta["val"].to(torch.uint8)
        given[k] = given[k].to(torch.uint8)
        with graph.inserting_after(_last_placeholder(graph)):
            real = _converted(graph, node, torch.float32)
        with graph.inserting_after(real):
            mask = graph.call_function(torch.ops.aten.ne.Scalar, (real, 0.0))
        mask.meta = {**node.meta, "val": real.meta["val"].to(torch.bool)}
        for user in users:
            user.replace_input_with(node, mask)
    return given


def _is_mask(node: fx.Node) -> bool:
    """Whether a value is booleans on a CPU, in memory of its own, by an operator that fuses."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dtype is torch.bool
        and value.device.type == "cpu"
        and ops.is_pointwise(node.target)
    )


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    made: fx.Node = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    made.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return made


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    *_, last = graph.find_nodes(op="placeholder")
    return last  # type: ignore[no-any-return]
