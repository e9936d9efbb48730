"""Find which fake values share a storage, and the bytes of each storage.

Bytes are counted per storage, not per tensor, so a view adds nothing to the bytes of its base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import fx

from remat import torch_compat
from remat.torch_compat import pytree

#: Metadata key for the workspace of a node: the bytes that a run of the node allocates besides its
#: inputs and results. The bytes are a number or an expression of symbolic sizes, or a function that measures
#: the node. The key is set when a plan is made for the machine that runs the step; read it by `workspace_of`.
WORKSPACE = "workspace"
#: Metadata key for a function that measures the workspace of a node in the layouts of compiled code. Its argument says
#: whether the node reads channels-last copies of four-dimensional tensors. It is set when `WORKSPACE` would be.
MEASURE = "measure_workspace"
#: Number assumed for a symbolic size without a hint.
UNBACKED_HINT = 4096

#: PyTorch's types of symbolic numbers.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

#: Numbers that `sizes_at` substitutes for symbols, by symbol name. None: use the symbols' hints from tracing.
_SIZES: ContextVar[Mapping[str, int] | None] = ContextVar("_SIZES", default=None)

#: Storage key, storage, and the value itself. Key and storage are None for a value without a storage.
#: The tuple keeps the value alive, so that no other object has the same `id`.
Memory = tuple[int | None, torch.UntypedStorage | None, Any]


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a pytree."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        # Whether a value is a leaf depends on its type only, so one value of each type is checked.
        # General flattening is slow.
        of_each_kind = {type(v): v for v in value}
        if all(map(pytree.tree_is_leaf, of_each_kind.values())):
            return list(value)
    return pytree.tree_leaves(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a pytree."""
    return [v for v in leaves_of(value) if isinstance(v, torch.Tensor)]


def fake_mode_of(value: Any) -> Any:
    """Return the fake mode of the first fake tensor in a pytree; None without a fake tensor."""
    return next((v.fake_mode for v in leaves_of(value) if hasattr(v, "fake_mode")), None)


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for other values and for layouts without a storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        # Some tensor implementations have no storage and raise.
        return value.untyped_storage()
    except NotImplementedError:
        return None


def storage_key(value: Any) -> int | None:
    """Return the integer that identifies the storage behind a value; None for a value without a storage."""
    storage = storage_of(value)
    return None if storage is None else torch_compat.storage_id(storage)


def storage_bytes(value: Any) -> int:
    """Return the bytes of the storage behind a fake tensor; 0 for a value that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    storage = storage_of(value)
    # A sparse tensor has no storage of its own.
    return tensor_bytes(value) if storage is None else hint(storage.nbytes())


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the elements of a tensor, or of all tensors in a tuple or list; 0 for other values."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not torch_compat.has_symbolic_sizes(value):
            return int(value.nbytes)
        return hint(value.numel()) * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(tensor_bytes, value))
    return 0


def extent_of(tensor: torch.Tensor) -> int:
    """Return how many elements of a storage lie between a tensor's first element and its last, gaps included."""
    if tensor.layout is not torch.strided:
        return hint(tensor.numel())
    places = [(hint(n), hint(step)) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return 0 if any(n == 0 for n, _ in places) else 1 + sum((n - 1) * step for n, step in places)


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return sizes, strides (or layout), dtype and device of a tensor as a hashable tuple."""
    sizes: Any = tensor.shape
    strides: Any = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    if torch_compat.has_symbolic_sizes(tensor):
        # Comparing symbols would add guards.
        sizes, strides = str(sizes), str(strides)
    return sizes, strides, tensor.dtype, tensor.device


def type_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor as text for messages, such as ``float32[8, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def workspace_of(node: fx.Node) -> Any:
    """Return the bytes of a node's workspace, as a number or an expression; None if no workspace is recorded."""
    workspace = node.meta.get(WORKSPACE)
    if callable(workspace):
        workspace = workspace(node)
        if workspace is None:
            del node.meta[WORKSPACE]
        else:
            node.meta[WORKSPACE] = workspace
    return workspace


def workspace_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's workspace as an int, found by `hint`; 0 if no workspace is recorded."""
    workspace = workspace_of(node)
    return 0 if workspace is None else hint(workspace)


def hint(size: Any) -> int:
    """Return a size as a nonnegative int, with a number in place of each symbol.

    A symbol is replaced by the number that a `sizes_at` block gives to it. A symbol to which no block gives a number
    is replaced by its hint from tracing, or by `UNBACKED_HINT` if it has no hint.
    """
    if type(size) is int:
        return size
    sizes = _SIZES.get()
    expression = expression_of(size) if sizes else None
    if sizes and expression is not None:
        numbers = {
            s: sympy.Integer(sizes[s.name]) for s in expression.free_symbols if s.name in sizes
        }
        if numbers:
            remainder = expression.xreplace(numbers)
            if remainder.is_number:
                return max(0, int(remainder))
            # Some symbols are left, for which `optimization_hint` below supplies numbers.
            size = size.node.shape_env.create_symintnode(remainder, hint=None)
    # A size such as `3 - u0` is negative if the number substituted for `u0` exceeds 3.
    return max(0, int(torch_compat.optimization_hint(size, fallback=UNBACKED_HINT)))


@contextlib.contextmanager
def sizes_at(sizes: Mapping[str, int]) -> Iterator[None]:
    """Make `hint` substitute numbers for the symbols of sizes, such as ``{"s0": 32}``, inside of a ``with`` block."""
    token = _SIZES.set(sizes)
    try:
        yield
    finally:
        _SIZES.reset(token)


def planned_sizes() -> Mapping[str, int]:
    """Return the numbers that the current `sizes_at` block gives to symbols, by symbol name; empty without a block."""
    return _SIZES.get() or {}


def expression_of(size: Any) -> Any:
    """Return the SymPy expression of a symbolic size; None for a constant and for a ragged dimension."""
    if not isinstance(size, torch.SymInt) or size.node.is_nested_int():
        return None
    expression = size.node.expr
    return expression if expression.free_symbols else None


def numbers_of(value: Any) -> tuple[Any, ...]:
    """Return the sizes of a tensor; for any other value, a tuple of the value alone."""
    return tuple(value.size()) if isinstance(value, torch.Tensor) else (value,)


def has_symbols(values: Iterable[Any], *, learned: bool = False) -> bool:
    """Return whether any size in ``values`` is symbolic and has a hint, or has none if ``learned`` is set."""
    return any(
        expression_of(size) is not None and size.node.has_hint() is not learned
        for value in values
        # Most values are tensors without symbols, whose sizes take time to read.
        if not isinstance(value, torch.Tensor) or torch_compat.has_symbolic_sizes(value)
        for size in numbers_of(value)
    )


class Memories:
    """Cache of the storage behind each value, shared by the passes over a graph.

    A cached record is (storage key, storage, value). Key and storage are None for a value without a
    storage.
    """

    def __init__(self, records: Mapping[int, Memory] | None = None) -> None:
        self._records: dict[int, Memory] = dict(records or {})

    def copy(self) -> Memories:
        """Return a copy of this cache of storages, for a copy of the graph that changes independently."""
        return Memories(self._records)

    def of(self, value: Any) -> Memory:
        """Return (storage key, storage, value) for a value, and cache this tuple."""
        record = self._records.get(id(value))
        if record is None:
            storage = storage_of(value)
            key = None if storage is None else torch_compat.storage_id(storage)
            record = self._records[id(value)] = key, storage, value
        return record

    def of_all(self, values: Iterable[Any]) -> list[Memory]:
        """Return (storage key, storage, value) for each value, from the cache if possible."""
        cached = self._records.get
        # A record is a nonempty tuple, so `or` replaces missing records only.
        return [cached(id(value)) or self.of(value) for value in values]

    def key(self, value: Any) -> int | None:
        """Return the key of the storage of a value; None for a value without a storage."""
        return self.of(value)[0]


class Sizes:
    """Looks up the storages behind the values of nodes, and records the bytes of each storage.

    A storage is identified by an integer, its key.

    Attributes:
        nbytes: bytes of each storage looked up so far, by storage key.
        symbolic: bytes of each storage of symbolic size as an expression, by storage key.
    """

    def __init__(self, memories: Memories | None = None) -> None:
        self.nbytes: dict[int, int] = {}
        self.symbolic: dict[int, Any] = {}
        self._memories = Memories() if memories is None else memories
        self._keys: dict[fx.Node, tuple[int, ...]] = {}

    def keys(self, node: fx.Node) -> tuple[int, ...]:
        """Return the storage key of each tensor in the value of a node."""
        cached = self._keys.get(node)
        if cached is None:
            leaves = leaves_of(node.meta.get("val"))
            cached = tuple(k for k in self.each(leaves) if k is not None)
            self._keys[node] = cached
        return cached

    def rename(self, node: fx.Node, key: int, other: int) -> None:
        """Replace one of a node's storage keys by another key, and record the same size for the new key."""
        self._keys[node] = tuple(other if k == key else k for k in self.keys(node))
        self.nbytes[other] = self.nbytes[key]
        if key in self.symbolic:
            self.symbolic[other] = self.symbolic[key]

    def of_all(self, nodes: Iterable[fx.Node]) -> dict[int, int]:
        """Return the bytes of each storage behind the values of nodes, by storage key."""
        return {key: self.nbytes[key] for node in nodes for key in self.keys(node)}

    def each(self, values: Iterable[Any]) -> list[int | None]:
        """Return the storage key of each value (None for one that is no tensor), and record each storage's bytes."""
        keys: list[int | None] = []
        for key, storage, value in self._memories.of_all(values):
            if storage is None and isinstance(value, torch.Tensor):
                # A tensor whose layout has no single storage counts as a storage of its own.
                # The `id` stays unique, because the cache keeps the value alive.
                key = id(value)
            if key is not None and key not in self.nbytes:
                size = value.numel() * value.element_size() if storage is None else storage.nbytes()
                self.nbytes[key] = tensor_bytes(value) if storage is None else hint(size)
                expression = None if type(size) is int else expression_of(size)
                if expression is not None:
                    self.symbolic[key] = expression
            keys.append(key)
        return keys

    def first_of(self, nodes: Iterable[fx.Node]) -> dict[int, fx.Node]:
        """Return a dict from each storage key to the first of the given nodes whose value is on the storage."""
        first: dict[int, fx.Node] = {}
        for node in nodes:
            for key in self.keys(node):
                first.setdefault(key, node)
        return first
