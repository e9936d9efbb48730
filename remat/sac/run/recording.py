"""Writing down every operator that forward runs, with the memory that it reads, writes and makes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)

from remat.errors import ProblemError
from remat.graph import ops
from remat.graph.memories import storage_of
from remat.graph.storages import hint, tensor_bytes
from remat.sac.run.module_calls import in_backward
from remat.sac.run.operators import is_skipped

#: What CUDA's caching allocator rounds up to.
CUDA_BLOCK_BYTES = 512
#: Operators that write to the statistics they are given, though their schema does not say so, with
#: the positions of the statistics and of the switch.
_STATISTICS = {
    torch.ops.aten.native_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.cudnn_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.miopen_batch_norm.default: ((3, 4), 5),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One operator that ran. Storages are told apart by a number.

    Attributes:
        op: the operator.
        node: the call as a node, for cost models.
        parts: what really runs: the call itself, or what the tensor subclasses it is given do.
        reads: storages of its arguments.
        writes: those that it writes to.
        returns: storages of its results.
        made: storages that it allocates, with their bytes.
        skipped: whether checkpointing passes over it.
        is_view: whether it returns nothing but views of its arguments.
        is_random: whether it draws random numbers.
    """

    op: Any
    node: fx.Node
    parts: tuple[fx.Node, ...]
    reads: frozenset[int]
    writes: tuple[int, ...]
    returns: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    skipped: bool
    is_view: bool
    is_random: bool

    @property
    def name(self) -> str:
        """As in ``aten.mm.default``."""
        return str(self.op)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run in forward; those of backward are let through.

    Attributes:
        calls: what ran, in order.
        inside: names of the modules that are running, outermost first; for messages.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.inside: list[str] = []
        self._nodes = _Nodes()
        self._device: torch.device | None = None
        mode = active_fake_mode()
        self._converts = mode if mode is not None and mode.allow_non_fake_inputs else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if in_backward():
            return func(*args, **kwargs)
        if self._converts is not None and not is_skipped(func):
            # Real parameters: what the mode puts in their place must be the same every time.
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.fake, (args, kwargs))
        if not any(map(is_traceable_wrapper_subclass_type, types)):
            out = func(*args, **kwargs)
            self._add(func, args, kwargs, out, None)
            return out
        parts = _Parts(self._nodes)
        with parts:
            out = func(*args, **kwargs)
        self._add(func, args, kwargs, out, tuple(parts.found))
        return out

    def _add(
        self, op: Any, args: Any, kwargs: Any, out: Any, parts: tuple[fx.Node, ...] | None
    ) -> None:
        results, skipped = tensors_in(out), is_skipped(op)
        if skipped and not results:
            return
        self._check_device(op, results)
        node = self._nodes.call(op, args, kwargs, out)
        reads = frozenset(k for t in tensors_in((args, kwargs)) for k, _, _ in storages(t))
        changed = written(op, args, kwargs)
        returned = {k: allocated_bytes(n, d) for t in results for k, n, d in storages(t)}
        self.calls.append(
            Call(
                op=op,
                node=node,
                parts=(node,) if parts is None else parts,
                reads=reads,
                writes=tuple(dict.fromkeys(k for t in changed for k, _, _ in storages(t))),
                returns=tuple(returned),
                made=tuple((k, n) for k, n in returned.items() if k not in reads),
                skipped=skipped,
                is_view=not changed and bool(returned) and reads.issuperset(returned),
                is_random=ops.is_random(node),
            )
        )

    def fake(self, x: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor in a fake mode that takes real ones."""
        if self._converts is None or is_fake(x):
            return x
        return self._converts.from_tensor(x)

    def _check_device(self, op: Any, results: Sequence[torch.Tensor]) -> None:
        for result in results:
            if result.dim() == 0 and result.device.type == "cpu":
                continue  # a number that comes along
            if self._device is None:
                self._device = result.device
            elif result.device != self._device:
                where = f"module '{self.inside[-1]}'" if self.inside else "outside of all modules"
                raise ProblemError(
                    f"{where}: {op} makes a tensor on {result.device}, and those before it are on "
                    f"{self._device}; expected a model on one device: estimate each part by itself"
                )


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What tensor subclasses do when they are given an operator."""

    def __init__(self, nodes: _Nodes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[fx.Node] = []
        self._nodes = nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_skipped(func):
            self.found.append(self._nodes.call(func, args, kwargs, out))
        return out


class _Nodes:
    """Calls as nodes of a graph. Nothing in it is connected: tensors are placeholders.

    The graph keeps all tensors alive, so that no two have the same identity.
    """

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._known: dict[int, fx.Node] = {}

    def call(self, op: Any, args: Any, kwargs: Any, out: Any) -> fx.Node:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._tensor, (tuple(args), kwargs))
        node = self._graph.call_function(op, args, kwargs)
        node.meta["val"] = out
        return node

    def _tensor(self, x: torch.Tensor) -> fx.Node:
        known = self._known.get(id(x))
        if known is None:
            known = self._known[id(x)] = self._graph.placeholder("x")
            known.meta["val"] = x
        return known


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested containers, dataclasses included."""
    return list(_tensors_in(values))


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for x in pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor):
            yield x
        elif hasattr(x, "__dataclass_fields__") and not isinstance(x, type):
            yield from _tensors_in([getattr(x, name, None) for name in x.__dataclass_fields__])


def storages(x: torch.Tensor) -> Iterator[tuple[int, int, torch.device]]:
    """Identity, bytes and device of each storage behind a tensor; of all in a tensor subclass."""
    for part in plain_parts(x):
        storage = storage_of(part)
        if storage is None:
            yield id(part), tensor_bytes(part), part.device
        else:
            yield storage._cdata, hint(storage.nbytes()), part.device


def plain_parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of: itself, or all that are in a tensor subclass."""
    if not is_traceable_wrapper_subclass_type(type(x)):
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
    if not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return []
    found = []
    for k, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[k] if k < len(args) else kwargs.get(argument.name))
    return tensors_in(found)
