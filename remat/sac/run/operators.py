"""Find the tensors and storages that an operator uses, and the operators that selective checkpointing ignores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from remat import torch_compat
from remat.graph.memory.storages import storage_of
from remat.graph.memory.writes import written_places, written_statistics
from remat.torch_compat import pytree

#: Operators that are ignored beside PyTorch's ``SAC_IGNORED_OPS``, as in PyTorch's ``sac_estimator``.
_ALSO = frozenset([torch.ops.aten.lift_fresh.default, torch.ops.aten.clone.default])


def is_skipped(op: Any) -> bool:
    """Whether selective checkpointing ignores an operator, such as ``detach``, ``clone`` or a profiler's marker.

    An operator that checkpointing ignores is in no plan, is not counted, and always runs again in recomputation.
    """
    # PyTorch never calls a policy for `detach` and queries of metadata. `lift_fresh` makes constants.
    return op in SAC_IGNORED_OPS or op in _ALSO or getattr(op, "namespace", "") == "profiler"


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return all tensors in a value: in nested containers, and in the fields of dataclasses."""
    tensors: list[torch.Tensor] = []
    for x in pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor):
            tensors.append(x)
        elif hasattr(x, "__dataclass_fields__") and not isinstance(x, type):
            tensors += tensors_in([getattr(x, name, None) for name in x.__dataclass_fields__])
    return tensors


def storages(x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (identity, plain tensor) for each storage behind a tensor; see `plain_parts`.

    The identity is the id of the storage; for a tensor without storage, such as a sparse tensor, the id of the tensor.
    """
    for part in plain_parts(x):
        storage = storage_of(part)
        yield id(part) if storage is None else torch_compat.storage_id(storage), part


def plain_parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor itself or, if its class is a wrapper subclass, the plain tensors inside."""
    if not torch_compat.is_traceable_wrapper_subclass_type(type(x)):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(x, name)
        if isinstance(inner, torch.Tensor):
            yield from plain_parts(inner)


def written_tensors(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments whose values an operator modifies, even if the operator's schema does not say so."""
    if places := written_statistics(op, args):
        return tensors_in([args[k] for k, _ in places])
    return declared_writes(op, args, kwargs)


def declared_writes(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments whose values an operator modifies according to the operator's schema."""
    places = written_places(op)
    # Operators such as transpose_, which make views in place, change metadata and no elements.
    if not places or torch.Tag.inplace_view in op.tags:
        return []
    return tensors_in([args[k] if k < len(args) else kwargs.get(name) for k, name in places])
