"""Roofline for compiled code: values that a fusing compiler keeps in registers move no bytes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from remat.graph.costs.roofline import Roofline
from remat.graph.fusion import may_fuse, producer_of, readers_of
from remat.graph.memory.storages import tensor_bytes, tensors_of


@dataclass(frozen=True, slots=True)
class RooflineFused(Roofline):
    """Cost model: `Roofline` in which values between fused nodes move no bytes, in picoseconds.

    A node costs ``max(operations / peak, external bytes / bandwidth)``, at least 1 ps. External bytes
    of a node that may fuse (`may_fuse`) are

    - the bytes that it reads from nodes that do not fuse with it: inputs, products, convolutions,
      attention, custom operators;
    - the bytes of each of its results that must be written: a result that the graph returns, that
      no node reads, or that is read by some node that does not fuse with it.

    A node that never fuses (a matrix product, for example) moves all its bytes, as under
    `Roofline`. For the same device, no node costs more than under `Roofline`.

    A node's cost must not depend on the plan, because the cost of a plan is the sum of node costs.
    Therefore the model assumes that every value between fused nodes stays in a register, although a plan
    may save the value and read it from memory. If several nodes read one value from memory, each node's
    cost includes its own read. Readers in forward and in backward are treated alike.
    """

    name: ClassVar[str] = "roofline-fused"
    summary: ClassVar[str] = "roofline; what a fusing compiler does not write to memory moves free"
    contextual: ClassVar[bool] = True

    def moved_bytes(self, node: fx.Node) -> int:
        """Return the bytes that one run of a node moves, without values that pass between fused neighbours."""
        if not may_fuse(node):
            return Roofline.moved_bytes(self, node)
        read = sum(
            tensor_bytes(n.meta.get("val"))
            for n in node.all_input_nodes
            if not fuse(node, producer_of(n))
        )
        value = node.meta.get("val")
        results = [node]
        if isinstance(value, (tuple, list)):
            results = [u for u in node.users if u.target is operator.getitem]
        return read + sum(tensor_bytes(r.meta.get("val")) for r in results if _is_written(node, r))


def _is_written(node: fx.Node, value: fx.Node) -> bool:
    """Return whether a value of ``node``, which a ``getitem`` may take from a tuple, must be written to memory."""
    readers = list(readers_of(value))
    return not readers or not all(fuse(node, reader) for reader in readers)


def fuse(a: fx.Node, b: fx.Node) -> bool:
    """Return whether a compiler may fuse two nodes, one of which reads the other, by their operators and devices."""
    return may_fuse(a) and may_fuse(b) and _device(a) == _device(b)


def _device(node: fx.Node) -> torch.device | None:
    return next((v.device for v in tensors_of(node.meta.get("val"))), None)
