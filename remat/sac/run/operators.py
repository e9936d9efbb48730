"""What an operator reads, writes and makes, and which ones selective checkpointing passes over."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from remat import torch_compat
from remat.graph.storages import storage_of
from remat.torch_compat import pytree

#: Operators beside PyTorch's that are neither counted nor decided about.
_ALSO = frozenset([torch.ops.aten.lift_fresh.default, torch.ops.aten.clone.default])
#: What CUDA's caching allocator rounds up to.
CUDA_BLOCK_BYTES = 512
#: Operators that write to the statistics they are given, though their schema does not say so, with
#: the positions of the statistics and of the switch.
_STATISTICS = {
    torch.ops.aten.native_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.cudnn_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.miopen_batch_norm.default: ((3, 4), 5),
}


def is_skipped(op: Any) -> bool:
    """Whether an operator is neither counted nor decided about; it runs again with the region.

    These are the operators that PyTorch never asks a policy about (detaching, and questions about
    metadata), constants coming in, copies by ``clone``, and the profiler's marks.
    """
    return op in SAC_IGNORED_OPS or op in _ALSO or getattr(op, "namespace", "") == "profiler"


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested containers, dataclasses included."""
    return list(_tensors_in(values))


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for x in pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor):
            yield x
        elif hasattr(x, "__dataclass_fields__") and not isinstance(x, type):
            yield from _tensors_in([getattr(x, name, None) for name in x.__dataclass_fields__])


def storages(x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Identity of each storage behind a tensor, with the plain tensor on it; see `plain_parts`.

    A layout without a storage, such as a sparse one, stands for itself.
    """
    for part in plain_parts(x):
        storage = storage_of(part)
        yield id(part) if storage is None else torch_compat.storage_id(storage), part


def plain_parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of: itself, or all that are in a tensor subclass."""
    if not torch_compat.is_traceable_wrapper_subclass_type(type(x)):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(x, name)
        if isinstance(inner, torch.Tensor):
            yield from plain_parts(inner)


def allocated_bytes(nbytes: int, device: torch.device) -> int:
    """Bytes that a storage takes: on CUDA, its allocator hands out whole blocks."""
    if device.type != "cuda" or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") != "0":
        return nbytes
    return math.ceil(nbytes / CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments whose numbers an operator changes."""
    if op in _STATISTICS:
        places, switch = _STATISTICS[op]
        return tensors_in([args[k] for k in places]) if args[switch] else []
    return declared_writes(op, args, kwargs)


def declared_writes(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator changes by its schema."""
    if not torch_compat.schema(op).is_mutable or torch.Tag.inplace_view in op.tags:
        return []
    found = []
    for k, argument in enumerate(torch_compat.schema(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[k] if k < len(args) else kwargs.get(argument.name))
    return tensors_in(found)
