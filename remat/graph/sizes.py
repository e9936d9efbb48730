"""Bytes of the storages behind the values of nodes: asked for once per storage, not per node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from remat.graph.memories import Memories
from remat.graph.storages import hint, tensor_bytes
from remat.torch_compat import pytree


class Sizes:
    """Keys of the storages of nodes, and bytes of each key: asked for once per storage.

    Args:
        memories: the memory behind the values, as far as it is known.
    """

    def __init__(self, memories: Memories | None = None) -> None:
        self.nbytes: dict[int, int] = {}
        self._memories = Memories() if memories is None else memories
        self._known: dict[fx.Node, tuple[int, ...]] = {}

    def keys(self, node: fx.Node) -> tuple[int, ...]:
        known = self._known.get(node)
        if known is None:
            value = node.meta.get("val")
            leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
            known = tuple(self.key(v) for v in leaves if isinstance(v, torch.Tensor))
            self._known[node] = known
        return known

    def rename(self, node: fx.Node, key: int, other: int) -> None:
        """Calls one storage behind the value of a node by another key."""
        if key != other:
            self._known[node] = tuple(other if k == key else k for k in self.keys(node))

    def of_all(self, nodes: Iterable[fx.Node]) -> dict[int, int]:
        """Storages of the values of nodes, with their bytes."""
        return {key: self.nbytes[key] for node in nodes for key in self.keys(node)}

    def key(self, tensor: torch.Tensor) -> int:
        key, storage, _ = self._memories.of(tensor)
        if key is None or storage is None:  # sparse and other layouts without one storage
            key = id(tensor)
            self.nbytes[key] = tensor_bytes(tensor)
        elif key not in self.nbytes:
            self.nbytes[key] = hint(storage.nbytes())
        return key

    def each(self, values: Iterable[Any]) -> list[int | None]:
        """The key of each value that is a tensor, None for any other."""
        keys: list[int | None] = []
        for key, storage, value in self._memories.of_all(values):
            if storage is None or key is None:
                key = self.key(value) if isinstance(value, torch.Tensor) else None
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
