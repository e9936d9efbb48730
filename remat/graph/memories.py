"""The memory behind fake values: asked for once per value, however many passes want to know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from remat import torch_compat

#: The memory behind a value: identity of its storage and the storage, None where there is none, and
#: the value itself, which is kept alive, so that nothing else takes its address.
Memory = tuple[int | None, torch.UntypedStorage | None, Any]


class Memories:
    """The memory behind values, remembered by the identity of the values."""

    def __init__(self) -> None:
        self._known: dict[int, Memory] = {}

    def copy(self) -> Memories:
        """What is known so far, for a graph that goes its own way from here."""
        same = Memories()
        same._known.update(self._known)
        return same

    def of(self, value: Any) -> Memory:
        """The memory behind a value."""
        found = self._known.get(id(value))
        if found is None:
            storage = storage_of(value)
            key = None if storage is None else torch_compat.storage_id(storage)
            found = self._known[id(value)] = key, storage, value
        return found

    def of_all(self, values: Iterable[Any]) -> list[Memory]:
        """The memory behind each of many values."""
        known = self._known.get
        return [known(id(value)) or self.of(value) for value in values]

    def key(self, value: Any) -> int | None:
        """Identity of the storage behind a value, or None for what has none."""
        return self.of(value)[0]


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """The storage behind a tensor; None for what is no tensor, and for layouts without storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()
    except NotImplementedError:
        return None
