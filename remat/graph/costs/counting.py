"""Cost models that count operators or floating-point operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from remat import torch_older
from remat.graph import ops
from remat.graph.costs.base import CostModel
from remat.graph.costs.formulas import FORMULAS
from remat.graph.memory.storages import hint, tensors_of
from remat.torch_compat import pytree

#: Inductor's operators that draw random numbers from a given seed. They are pure functions of the seed, but as
#: slow as other random operators.
_SEEDED = ("prims.inductor_random", "prims.inductor_randint")
#: Number of window dimensions of each max-pooling operator, by operator name.
_MAX_POOLS = {
    "aten.max_pool2d_with_indices": 2,
    "aten.max_pool3d_with_indices": 3,
    "prims._low_memory_max_pool_with_offsets": 2,
}


@dataclass(frozen=True, slots=True)
class Unit(CostModel):
    """Cost model in which every operator costs 1."""

    name: ClassVar[str] = "unit"
    unit: ClassVar[str] = "op"
    summary: ClassVar[str] = "1 for every operator"

    def cost(self, node: fx.Node) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Flops(CostModel):
    """Cost model that counts floating-point operations of products, convolutions and attention.

    Every operator costs at least 1.
    """

    name: ClassVar[str] = "flops"
    unit: ClassVar[str] = "FLOP"
    summary: ClassVar[str] = (
        "floating-point operations of products, convolutions, attention; else 1"
    )

    def cost(self, node: fx.Node) -> int:
        return max(1, count_flops(node))


def count_flops(node: fx.Node) -> int:
    """Return the number of floating-point operations in one run of a node.

    The result is 0 for operators without a formula, and for shapes that a formula does not cover.
    """
    packet = ops.packet(node.target)
    # Some formulas of PyTorch are wrong: the backward of a grouped convolution counts `1 + groups` times its
    # forward. PyTorch's registry has the formulas of `flex_attention` and of custom operators.
    own_formula = FORMULAS.get(str(packet))
    torch_formula = None if own_formula else torch_older.flop_formula(packet)
    if own_formula is None and torch_formula is None:
        return 0
    args, kwargs = pytree.tree_map(_shaped, (node.args, node.kwargs))
    out = pytree.tree_map(_shaped, node.meta.get("val"))
    try:
        if own_formula is not None:
            return own_formula(args, out)
        return int(torch_formula(*args, **kwargs, out_val=out))  # type: ignore[misc]
    except (AssertionError, RuntimeError, NotImplementedError, TypeError, IndexError):
        # The formula does not cover these shapes, which must not end planning. The node's cost still
        # includes memory time.
        return 0


def count_draws(node: fx.Node) -> int:
    """Return how many random numbers one run of a node draws: one per element of the largest result."""
    draws = str(ops.packet(node.target)) in _SEEDED or ops.is_random(node)
    return _elements(node) if draws else 0


def count_tanh(node: fx.Node) -> int:
    """Return how many hyperbolic tangents one run of a node computes, as ``tanh`` and an approximate ``gelu`` do."""
    packet, args = ops.packet(node.target), node.args
    if packet is torch.ops.aten.tanh:
        return _elements(node)
    if packet is torch.ops.aten.gelu and "tanh" in (*args[1:], *node.kwargs.values()):
        return _elements(node)
    return 0


def count_pooled(node: fx.Node) -> int:
    """Return how many elements the windows of a max pooling read in one run; 0 for any other operator."""
    spatial = _MAX_POOLS.get(str(ops.packet(node.target)))
    if spatial is None:
        return 0
    window = [hint(size) for size in node.args[1]]  # type: ignore[union-attr]
    extents = window * spatial if len(window) == 1 else window
    return _elements(node) * math.prod(extents)


#: Kinds of work that may take longer than reading and writing the operator's tensors. Each key is the attribute
#: of `Device` that holds the rate. Each value is the function that counts this work in one run of a node.
SLOW: Mapping[str, Callable[[fx.Node], int]] = {
    "draws_tops": count_draws,
    "tanh_tops": count_tanh,
    "pooled_tops": count_pooled,
}


def _elements(node: fx.Node) -> int:
    """Return the number of elements of a node's largest result."""
    tensors = tensors_of(node.meta.get("val"))
    return max((math.prod(hint(s) for s in t.shape) for t in tensors), default=0)


def _shaped(x: Any) -> Any:
    """Convert an argument to the form that FLOP formulas take, with symbolic sizes as ints."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    if isinstance(value, torch.Tensor):
        # A meta tensor, because some formulas read more than shapes.
        return torch.empty([hint(s) for s in value.shape], dtype=value.dtype, device="meta")
    return hint(value) if isinstance(value, torch.SymInt) else value
