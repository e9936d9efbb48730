"""Avoid a fault of AOTAutograd, which computes wrong tangents of outputs whose elements share memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph.memory.storages import hint


def layouts_of_tangents(graph: fx.Graph) -> dict[str, Any]:
    """Return settings that make AOTAutograd's tangents correct for outputs whose elements share memory."""
    leaves = torch_compat.pytree.tree_leaves([n.args for n in graph.find_nodes(op="output")])
    outputs = (n.meta.get("example_value") for n in leaves if isinstance(n, fx.Node))
    # AOTAutograd copies each tangent into the layout of its output. If elements of the output share memory, as
    # after `Tensor.unfold`, so do those of the copy. AOTAutograd makes an exception for strides of 0 alone.
    overlap = any(isinstance(o, torch.Tensor) and _overlaps_itself(o) for o in outputs)
    return {"guess_tangent_strides_as_outputs": False} if overlap else {}


def _overlaps_itself(value: torch.Tensor) -> bool:
    """Return whether two elements of a strided tensor may share memory, although no stride is 0."""
    if value.layout != torch.strided or type(value) not in (torch.Tensor, torch_compat.FakeTensor):
        return False
    both = zip(value.shape, value.stride(), strict=True)
    steps = sorted((hint(stride), hint(size)) for size, stride in both if hint(size) > 1)
    if not steps or not steps[0][0]:
        return False
    end = 0
    for stride, size in steps:
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False
