"""The storages behind fake values: which values share one, and how many bytes each takes.

Bytes are counted per storage, not per tensor: a view costs nothing beyond its base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from remat import torch_compat
from remat.torch_compat import pytree

#: Stands in for a symbolic size that nothing is known about.
UNBACKED_HINT = 4096

#: Key of the storage behind a value and the storage, None where there is none, and the value itself,
#: which is kept alive, so that nothing else takes its address.
Memory = tuple[int | None, torch.UntypedStorage | None, Any]


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """The storage behind a tensor; None for other values, and for layouts without storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()
    except NotImplementedError:
        return None


def storage_key(value: Any) -> int | None:
    """A number that tells the storage behind a value from all others; None where there is none."""
    storage = storage_of(value)
    return None if storage is None else torch_compat.storage_id(storage)


def storage_bytes(value: Any) -> int:
    """Bytes of the storage behind a fake tensor; symbolic sizes count by their hint."""
    if not isinstance(value, torch.Tensor):
        return 0
    storage = storage_of(value)
    return tensor_bytes(value) if storage is None else hint(storage.nbytes())


def tensor_bytes(value: Any) -> int:
    """Bytes of the elements of a value: of a tensor, or of all tensors of a tuple."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not torch_compat.has_symbolic_sizes(value):
            return int(value.nbytes)
        return hint(value.numel()) * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(tensor_bytes, value))
    return 0


def hint(size: Any) -> int:
    """A size as an int, symbolic ones by their hint."""
    return size if type(size) is int else int(optimization_hint(size, fallback=UNBACKED_HINT))


def growth(values: Iterable[Any]) -> float:
    """The power of symbolic sizes with which the fastest of some values grows; 0 where no size is a symbol.

    Measured from the sizes of now to twice those: 1 for activations of a batch, 2 for attention scores over a
    length. Sizes of ragged dimensions have no number, and do not count.
    """
    known: dict[Any, int] = {}
    counts: dict[Any, int] = {}
    for value in values:
        sizes = value.size() if isinstance(value, torch.Tensor) else (value,)
        if not any(isinstance(size, torch.SymInt) for size in sizes):
            continue
        for size in (*sizes, value.numel()) if isinstance(value, torch.Tensor) else sizes:
            if (
                isinstance(size, torch.SymInt)
                and size.node.has_hint()
                and not size.node.is_nested_int()
            ):
                (known if size.node.expr.is_Symbol else counts)[size.node.expr] = hint(size)
    grown = [1.0] if known else []
    for expression, now in counts.items():
        twice = expression.subs({symbol: 2 * size for symbol, size in known.items()})
        if now > 0 and twice.is_number and twice > 0:
            grown.append(math.log2(float(twice) / now))
    return max(grown, default=0.0)


class Memories:
    """The storages behind values, looked up once per value, however many passes ask."""

    def __init__(self, known: dict[int, Memory] | None = None) -> None:
        self._known: dict[int, Memory] = {} if known is None else known

    def copy(self) -> Memories:
        """What is known so far, for a graph that goes its own way from here."""
        return Memories(dict(self._known))

    def of(self, value: Any) -> Memory:
        """The storage behind a value."""
        found = self._known.get(id(value))
        if found is None:
            storage = storage_of(value)
            key = None if storage is None else torch_compat.storage_id(storage)
            found = self._known[id(value)] = key, storage, value
        return found

    def of_all(self, values: Iterable[Any]) -> list[Memory]:
        """The storage behind each of many values."""
        known = self._known.get
        return [known(id(value)) or self.of(value) for value in values]

    def key(self, value: Any) -> int | None:
        """Key of the storage behind a value; None where there is none."""
        return self.of(value)[0]


class Sizes:
    """The storages behind the values of nodes, by key, with their bytes.

    A tensor of a layout without one storage, such as a sparse one, counts as a storage of its own.

    Args:
        memories: the storages behind the values, as far as they are known.

    Attributes:
        nbytes: bytes of each storage that was asked for.
    """

    def __init__(self, memories: Memories | None = None) -> None:
        self.nbytes: dict[int, int] = {}
        self._memories = Memories() if memories is None else memories
        self._known: dict[fx.Node, tuple[int, ...]] = {}

    def keys(self, node: fx.Node) -> tuple[int, ...]:
        """Key of the storage of each tensor in the value of a node."""
        known = self._known.get(node)
        if known is None:
            value = node.meta.get("val")
            leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
            known = tuple(k for k in self.each(leaves) if k is not None)
            self._known[node] = known
        return known

    def rename(self, node: fx.Node, key: int, other: int) -> None:
        """Calls one storage behind the value of a node by another key."""
        if key != other:
            self._known[node] = tuple(other if k == key else k for k in self.keys(node))

    def of_all(self, nodes: Iterable[fx.Node]) -> dict[int, int]:
        """Bytes of each storage behind the values of nodes."""
        return {key: self.nbytes[key] for node in nodes for key in self.keys(node)}

    def each(self, values: Iterable[Any]) -> list[int | None]:
        """Key of the storage of each value that is a tensor, None for any other."""
        keys: list[int | None] = []
        for key, storage, value in self._memories.of_all(values):
            if storage is None or key is None:
                key = id(value) if isinstance(value, torch.Tensor) else None
                if key is not None:
                    self.nbytes[key] = tensor_bytes(value)
            elif key not in self.nbytes:
                self.nbytes[key] = hint(storage.nbytes())
            keys.append(key)
        return keys

    def first_of(self, nodes: Iterable[fx.Node]) -> dict[int, fx.Node]:
        """For each storage of the values of nodes, the first node that has it."""
        found: dict[int, fx.Node] = {}
        for node in nodes:
            for key in self.keys(node):
                found.setdefault(key, node)
        return found
