"""Decide which nodes a compiler such as Inductor can fuse, that is, compute in one kernel.

Cost models, the prediction of kernels, and the minimum cut use these rules of fusion. Which nodes fuse depends on
operators and values only, never on a plan.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.graph import ops
from remat.graph.memory.storages import hint, tensors_of
from remat.graph.memory.writes import aliased_argument

#: Indexed reads, and writes into a part of a copy. Inductor fuses them, but the operator lists of PyTorch's partitioner
#: leave them out.
INDEXED = (torch.ops.aten._unsafe_index, torch.ops.aten._unsafe_masked_index)
_WRITTEN_PARTS = (torch.ops.aten.cat, torch.ops.aten.select_scatter, torch.ops.aten.slice_scatter)


def may_fuse(node: fx.Node) -> bool:
    """Return whether a compiler such as Inductor may fuse a node with other nodes."""
    taxonomy = ops.default_taxonomy()
    return (
        node.op == "call_function"
        and not isinstance(node.target, torch_compat.HigherOrderOperator)
        and taxonomy.is_fusible(node)
        and not taxonomy.is_compute_intensive(node)  # attention may be random, but never fuses
        and not ops.is_mutating(node)
    )


def absorbed_inputs(node: fx.Node) -> list[fx.Node]:
    """Return those inputs of a ``cat`` or similar node that a compiler can compute directly into the node's result."""
    target, higher = node.target, torch.ops.higher_order
    if ops.packet(target) is torch.ops.aten.cat:
        return node.all_input_nodes
    if target is higher.auto_functionalized:
        names, _ = torch_compat.get_mutable_args(node.args[0])  # type: ignore[arg-type]
        arguments = [node.kwargs.get(name) for name in names]
        lists = (x if isinstance(x, list) else [x] for x in arguments)
        return [x for xs in lists for x in xs if isinstance(x, fx.Node)]
    if target is higher.triton_kernel_wrapper_functional:
        kernel_args: Any = node.kwargs.get("kwargs") or {}
        return [kernel_args[name] for name in node.kwargs.get("tensors_to_clone") or ()]  # type: ignore[union-attr]
    return []


def is_passed_on(node: fx.Node) -> bool:
    """Return whether a node's result is an element of a tuple or aliases an argument, as a view does."""
    return node.target is operator.getitem or aliased_argument(node) is not None


def producer_of(node: fx.Node) -> fx.Node:
    """Return the node that computes the data of a view or tuple element; return any other node itself."""
    # The result of an in-place operator also aliases an argument, but the operator computes something.
    while is_passed_on(node) and not ops.is_mutating(node):
        base = node.args[0] if node.target is operator.getitem else aliased_argument(node)
        if not isinstance(base, fx.Node):
            break
        node = base
    return node


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a value, directly or through views and elements of tuples."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if is_passed_on(user) and not ops.is_mutating(user):
            waiting.extend(user.users)
        else:
            yield user


def generates(node: fx.Node) -> bool:
    """Return whether Inductor generates code for a node; it generates no code for operators on complex numbers."""
    listed = may_fuse(node) or ops.packet(node.target) in (*INDEXED, *_WRITTEN_PARTS)
    if not listed and not _is_summed_product(node):
        return False
    values = tensors_of([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return not any(v.dtype.is_complex for v in values)


@functools.cache
def is_scatter(target: Any) -> bool:
    """Return whether an operator is an out-of-place index write or scatter; its kernel also computes the new values."""
    name = str(target).split(".")[1:2]
    return any(part in n and n[-1] != "_" for n in name for part in ("index_put", "scatter"))


def is_grouped(node: fx.Node) -> bool:
    """Return whether a node is a scatter on a CPU, which Inductor runs in one C++ function with its neighbours."""
    value = node.meta.get("val")
    return (
        is_scatter(node.target) and isinstance(value, torch.Tensor) and value.device.type == "cpu"
    )


def _is_summed_product(node: fx.Node) -> bool:
    """Return whether a node is a batched matrix product that Inductor computes as elementwise products and a sum."""
    value = node.meta.get("val")
    if node.target is not torch.ops.aten.bmm.default or not isinstance(value, torch.Tensor):
        return False
    # Inductor does so on a CPU, if the products have one row or one column.
    return value.device.type == "cpu" and any(hint(n) <= 1 for n in value.shape[1:])


def added_product(node: fx.Node) -> fx.Node | None:
    """Return the matrix product that Inductor merges with an addition; None if the addition reads no such product."""
    aten = torch.ops.aten
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    for product, other in (node.args[1::-1], node.args[:2]):
        assert isinstance(product, fx.Node)
        assert isinstance(other, fx.Node)
        result, addend = product.meta.get("val"), other.meta.get("val")
        if product.target is not aten.mm.default or len(product.users) != 1:
            continue
        if not isinstance(result, torch.Tensor) or not isinstance(addend, torch.Tensor):
            continue
        alike = result.dtype == addend.dtype and _expands(addend.shape, result.shape)
        # On a GPU, Inductor keeps the sum out of the product if the sum can fuse with all its readers
        # (`should_prefer_unfused_addmm`).
        if alike and (result.device.type == "cpu" or not all(map(may_fuse, node.users))):
            return product
    return None


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether a shape can be expanded to another shape of at least as many dimensions."""
    ends = zip(reversed([hint(n) for n in shape]), reversed([hint(n) for n in to]), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in ends)
