"""Hand boolean masks from forward to backward as bytes, which Inductor vectorises on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from remat.graph import ops
from remat.graph.joint import outputs_of
from remat.integrations.workarounds import is_needed


def masks_to_bytes(graph: fx.Graph, own: int) -> frozenset[str]:
    """Make forward return boolean masks as bytes of 0 and 1, which Inductor vectorises on a CPU."""
    # PyTorch 2.13 to 2.15 do not vectorise reads and writes of booleans in memory. A relu of two million elements that
    # also wrote its mask took 20 ms instead of 0.5 ms; a step of two linear layers with relu, 162 ms instead of 99 ms.
    # A mask that is converted to ``uint8`` via ``float32`` has the same size, and adds no measurable time.
    if not is_needed(masks_to_bytes):
        return frozenset()
    returned = outputs_of(graph)
    unchanged = {v for v in returned[:own] if isinstance(v, fx.Node)}
    masks = dict.fromkeys(
        v for v in returned[own:] if isinstance(v, fx.Node) and v not in unchanged and _is_mask(v)
    )
    output = graph.output_node()
    for mask in masks:
        with graph.inserting_before(output):
            packed = _converted(graph, _converted(graph, mask, torch.float32), torch.uint8)
        output.replace_input_with(mask, packed)
    return frozenset(m.name for m in masks)


def masks_from_bytes(graph: fx.Graph, inputs: Sequence[Any], names: Iterable[str]) -> Sequence[Any]:
    """Undo `masks_to_bytes` in backward: convert the bytes that forward returns back to boolean masks."""
    wanted, given = frozenset(names), list(inputs)
    placeholders = list(graph.find_nodes(op="placeholder"))
    for k, node in enumerate(placeholders):
        if node.name not in wanted:
            continue
        users = list(node.users)
        node.meta["val"] = node.meta["val"].to(torch.uint8)
        given[k] = given[k].to(torch.uint8)
        with graph.inserting_after(placeholders[-1]):
            real = _converted(graph, node, torch.float32)
        with graph.inserting_after(real):
            mask = graph.call_function(torch.ops.aten.ne.Scalar, (real, 0.0))
        mask.meta = {**node.meta, "val": real.meta["val"].to(torch.bool)}
        for user in users:
            user.replace_input_with(node, mask)
    return given


def _is_mask(node: fx.Node) -> bool:
    """Return whether a node computes a boolean CPU tensor by a pointwise operator."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.dtype is torch.bool
        and value.device.type == "cpu"
        and ops.is_pointwise(node.target)
    )


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a node that converts the value of ``node`` to another dtype, and return the new node."""
    converted: fx.Node = graph.call_function(
        torch.ops.prims.convert_element_type.default, (node, dtype)
    )
    converted.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return converted
