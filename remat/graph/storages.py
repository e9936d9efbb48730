"""The storages behind fake values: which values share one, and how many bytes each takes.

Bytes are counted per storage, not per tensor: a view costs nothing beyond its base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from remat import torch_compat
from remat.torch_compat import pytree

#: Key of the metadata of a node: the bytes that running it takes beside what it reads and returns, a number or an
#: expression of sizes. Whoever plans for the machine that the step runs on writes it.
WORKSPACE = "workspace"
#: Stands in for a symbolic size that nothing is known about.
UNBACKED_HINT = 4096

#: Numbers that may be symbols.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

#: Numbers that stand in for symbols, by name, instead of the sizes that a step was traced with.
_SIZES: ContextVar[Mapping[str, int] | None] = ContextVar("_SIZES", default=None)

#: Key of the storage behind a value and the storage, None where there is none, and the value itself,
#: which is kept alive, so that nothing else takes its address.
Memory = tuple[int | None, torch.UntypedStorage | None, Any]


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a value. Most values are a tensor or flat, and skip the slow general flattening."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        of_each_kind = {type(v): v for v in value}
        if all(map(pytree.tree_is_leaf, of_each_kind.values())):
            return list(value)
    return pytree.tree_leaves(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    return [v for v in leaves_of(value) if isinstance(v, torch.Tensor)]


def fake_mode_of(value: Any) -> Any:
    """The mode of the first fake tensor in a value; None if there is none."""
    return next((v.fake_mode for v in leaves_of(value) if hasattr(v, "fake_mode")), None)


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """The storage behind a tensor; None for other values, and for layouts without storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()
    except NotImplementedError:
        return None


def storage_key(value: Any) -> int | None:
    """A number that identifies the storage of a value; None without a storage."""
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


def extent_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that a tensor reaches in its memory; all of one without strides."""
    if tensor.layout is not torch.strided:
        return hint(tensor.numel())
    places = [(hint(n), hint(step)) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return 0 if any(n == 0 for n, _ in places) else 1 + sum((n - 1) * step for n, step in places)


def hint(size: Any) -> int:
    """A size as an int, symbolic ones by their hint, or by what `sizes_at` puts in its place.

    What is left of a length, ``3 - u0``, is negative for a number that stands in for ``u0``: that is no size, and is 0.
    """
    if type(size) is int:
        return size
    sizes = _SIZES.get()
    expression = expression_of(size) if sizes else None
    if sizes and expression is not None:
        known = {
            s: sympy.Integer(sizes[s.name]) for s in expression.free_symbols if s.name in sizes
        }
        if known:
            left = expression.xreplace(known)
            if left.is_number:
                return max(0, int(left))
            size = size.node.shape_env.create_symintnode(left, hint=None)
    return max(0, int(optimization_hint(size, fallback=UNBACKED_HINT)))


@contextlib.contextmanager
def sizes_at(sizes: Mapping[str, int]) -> Iterator[None]:
    """Has `hint` take symbols, by name, for these numbers: plans and their figures are then for these sizes."""
    token = _SIZES.set(sizes)
    try:
        yield
    finally:
        _SIZES.reset(token)


def planned_sizes() -> Mapping[str, int]:
    """The values that `sizes_at` substitutes for symbols."""
    return _SIZES.get() or {}


def expression_of(size: Any) -> Any:
    """The expression of a symbolic size in symbols; None for an int, and for a ragged dimension."""
    if not isinstance(size, torch.SymInt) or size.node.is_nested_int():
        return None
    expression = size.node.expr
    return expression if expression.free_symbols else None


def numbers_of(value: Any) -> tuple[Any, ...]:
    """The sizes of a tensor; another value by itself."""
    return tuple(value.size()) if isinstance(value, torch.Tensor) else (value,)


def has_symbols(values: Iterable[Any], *, learned: bool = False) -> bool:
    """Whether a size of some values is a symbol: one that inputs have, or one that is ``learned`` from the data."""
    return any(
        expression_of(size) is not None and size.node.has_hint() is not learned
        for value in values
        for size in numbers_of(value)
    )


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
        """Key of the storage of a value; None without a storage."""
        return self.of(value)[0]


class Sizes:
    """The storages behind the values of nodes, by key, with their bytes.

    A tensor of a layout without one storage, such as a sparse one, counts as a storage of its own.

    Args:
        memories: the storages behind the values, as far as they are known.

    Attributes:
        nbytes: bytes of each storage that was asked for.
        symbolic: the same as expressions of symbols, of those that depend on any.
    """

    def __init__(self, memories: Memories | None = None) -> None:
        self.nbytes: dict[int, int] = {}
        self.symbolic: dict[int, Any] = {}
        self._memories = Memories() if memories is None else memories
        self._known: dict[fx.Node, tuple[int, ...]] = {}

    def keys(self, node: fx.Node) -> tuple[int, ...]:
        """Key of the storage of each tensor in the value of a node."""
        known = self._known.get(node)
        if known is None:
            leaves = leaves_of(node.meta.get("val"))
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
                    self._note(key, value.numel() * value.element_size())
            elif key not in self.nbytes:
                nbytes = storage.nbytes()
                self.nbytes[key] = hint(nbytes)
                self._note(key, nbytes)
            keys.append(key)
        return keys

    def copy(self, key: int, other: int) -> None:
        """Gives a storage the bytes of another."""
        self.nbytes[key] = self.nbytes[other]
        if other in self.symbolic:
            self.symbolic[key] = self.symbolic[other]

    def _note(self, key: int, nbytes: Any) -> None:
        if type(nbytes) is not int:
            expression = expression_of(nbytes)
            if expression is not None:
                self.symbolic[key] = expression

    def first_of(self, nodes: Iterable[fx.Node]) -> dict[int, fx.Node]:
        """For each storage of the values of nodes, the first node that has it."""
        found: dict[int, fx.Node] = {}
        for node in nodes:
            for key in self.keys(node):
                found.setdefault(key, node)
        return found
