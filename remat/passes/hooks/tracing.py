"""Saved-tensor hooks as graphs: pack and unpack, traced for one kind of saved tensor."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils.weak import TensorWeakRef

from remat import torch_compat
from remat.errors import PlanError, RematError, summary
from remat.graph import ops
from remat.graph.joint import output_node
from remat.graph.storages import SYMBOLIC, Sizes, hint
from remat.passes.packing.pairs import (
    SavedTensorHooks,
    check_unpacked,
    format_kind,
    naming,
    register,
)
from remat.torch_compat import pytree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """Both hooks for tensors of one kind.

    Attributes:
        pack: takes the saved tensor and returns the tensors and sizes to hand over.
        unpack: takes those and returns the tensor; constants that pack returned are part of it.
            None where pack declined, returning the tensor itself.
        eager: why the hooks run outside of the graph; empty where they are part of it.
    """

    pack: fx.GraphModule
    unpack: fx.GraphModule | None
    eager: str = ""

    @property
    def packed_bytes(self) -> int:
        """Bytes of the memory that is handed over in place of the tensor's."""
        handed: Any = output_node(self.pack.graph).args[0]
        return sum(Sizes().of_all(n for n in handed if isinstance(n, fx.Node)).values())


@dataclass(slots=True, eq=False)
class Traces:
    """The traces of one pair of hooks: one for each shape, layout, dtype and device.

    Attributes:
        hooks: the pair.
        lower: the lowering whose operators the graphs are made of.
    """

    hooks: SavedTensorHooks
    lower: str
    _known: dict[tuple[Any, ...], Traced] = field(default_factory=dict)

    def of(self, value: torch.Tensor) -> Traced:
        """The hooks for tensors like a fake one.

        Raises:
            PlanError: pack writes to what it is given, or unpack returns another kind of tensor.
        """
        kind = (tuple(value.shape), value.stride(), value.dtype, value.device)
        if not all(type(s) is int for s in (*value.shape, *value.stride())):
            return self._trace(value)  # tracing may add guards on the symbols of this very graph
        if kind not in self._known:
            self._known[kind] = self._trace(value)
        return self._known[kind]

    def _trace(self, value: torch.Tensor) -> Traced:
        try:
            return trace(self.hooks, value, self.lower)
        except UntraceableError as error:
            return replace(trace(_eager(self.hooks), value, self.lower), eager=str(error))


class UntraceableError(RematError):
    """Hooks that cannot be part of a graph; the message says why."""


def _eager(hooks: SavedTensorHooks) -> SavedTensorHooks:
    """The same hooks behind operators that can be part of a graph."""
    from remat.passes.packing.eager import pack_eagerly, unpack_eagerly

    key = register(hooks)
    return replace(
        hooks,
        pack=lambda x: (pack_eagerly(x, key), (tuple(x.shape), x.stride(), x.dtype, x.device)),
        unpack=lambda packed: unpack_eagerly(packed[0], key, *packed[1]),
    )


def trace(hooks: SavedTensorHooks, value: torch.Tensor, lower: str) -> Traced:
    """Traces both hooks for tensors like a fake one.

    Raises:
        UntraceableError: they cannot be part of a graph.
        PlanError: as from `Traces.of`.
    """
    constants: list[Any] = []
    structure: list[pytree.TreeSpec] = []

    def pack(x: torch.Tensor) -> tuple[Any, ...]:
        with naming("pack", UntraceableError):
            returned = hooks.pack(x)
        leaves, spec = pytree.tree_flatten(returned)
        constants[:] = [_HANDED if _is_handed(v) else v for v in leaves]
        structure[:] = [spec]
        return tuple(v for v in leaves if _is_handed(v))

    def unpack(*handed: Any) -> torch.Tensor:
        values = iter(handed)
        leaves = [next(values) if c is _HANDED else c for c in constants]
        with naming("unpack", UntraceableError):
            returned = hooks.unpack(structure[0].unflatten(leaves))
        kind = value.shape, value.dtype, value.device
        return _laid_out_as(value, check_unpacked(hooks.name, returned, *kind))

    graph = partial(_graph, hooks=hooks, lower=lower, mode=getattr(value, "fake_mode", None))
    packing = graph(pack, [value], "pack")
    packed = packing.graph
    handed: Any = output_node(packed).args[0]
    if list(handed) == [next(iter(packed.nodes))] and constants == [_HANDED]:
        return Traced(pack=packing, unpack=None)
    given = [n.meta["val"] if isinstance(n, fx.Node) else n for n in handed]
    if any(isinstance(v, (torch.SymBool, int)) or free_unbacked_symbols(v) for v in given):
        raise UntraceableError("pack returns a number or a size that depends on data")
    unpacking = graph(unpack, given, "unpack")
    return Traced(pack=packing, unpack=unpacking)


_HANDED = object()
#: Nothing is differentiated here: detaching changes nothing. PyTorch 2.15 traces it as an alias.
_THE_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _is_handed(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *SYMBOLIC))


def _graph(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    which: str,
    *,
    hooks: SavedTensorHooks,
    lower: str,
    mode: Any,
) -> fx.GraphModule:
    """The operators that a function runs, without writes in place."""
    made = _Made()
    traced = _traced(function, inputs, lower, mode, made)
    _refuse_kept(which, traced, made)
    if any(map(ops.is_mutating, traced.graph.nodes)):
        without_writes = torch.func.functionalize(function, remove="mutations")
        traced = _traced(without_writes, inputs, lower, mode)
        written = [n for n in traced.graph.nodes if ops.is_mutating(n)]
        if written:
            raise PlanError(
                f"{which} of hooks '{hooks.name}' writes to what it is given ({written[0].target}); what "
                "forward or a second backward still reads would change: write to a clone"
            )
    for node in traced.graph.nodes:
        if isinstance(node.target, torch_compat.HigherOrderOperator):
            raise UntraceableError(f"it calls the higher-order operator {node.target}")
        if lower == "inductor" and node.op == "call_function" and ops.is_random(node):
            raise UntraceableError(
                f"it draws random numbers ({node.target}), which Inductor would have to know before "
                "the graph is split"
            )
        if node.target in _THE_SAME:
            node.replace_all_uses_with(node.args[0])
    traced.graph.eliminate_dead_code()
    return traced


def _traced(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    lower: str,
    mode: Any,
    made: _Made | None = None,
) -> fx.GraphModule:
    table = torch_compat.select_decomp_table() if lower == "inductor" else None
    trace_it = make_fx(function, table, _disable_torch_fn_metadata_mode=True)
    inputs = [_own(v) for v in inputs]
    with _tracing(mode), made or contextlib.nullcontext():
        if made is not None:
            made.note(inputs)
        try:
            return trace_it(*inputs)
        except RematError:
            raise
        except Exception as error:  # foreign code: whatever it does that a trace cannot follow
            raise UntraceableError(summary(error)) from error


def _own(value: Any) -> Any:
    """A fake tensor that lives on only where a function keeps it, of the very symbols of another one."""
    fake = isinstance(value, torch_compat.FakeTensor)
    return torch_compat.fast_detach(value.fake_mode, value) if fake else value


class _Made(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that a function is given and makes while it is traced, and keeps none alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[TensorWeakRef] = []

    def note(self, values: Any) -> None:
        """Notes the tensors without numbers in a tree."""
        leaves = pytree.tree_leaves(values)
        fakes = (v for v in leaves if isinstance(v, torch_compat.FakeTensor))
        self._noted.extend(map(TensorWeakRef, fakes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.note(returned)
        return returned

    def alive(self) -> list[torch.Tensor]:
        """The recorded tensors that are still referenced."""
        if all(ref() is None for ref in self._noted):
            return []
        # A tensor that only a cycle holds is not kept by the hook.
        gc.collect()
        return [tensor for ref in self._noted if (tensor := ref()) is not None]


def _refuse_kept(which: str, traced: fx.GraphModule, made: _Made) -> None:
    """Refuses a function that keeps tensors it saw only while it was traced, or reads such ones.

    Raises:
        UntraceableError: it does; where it is run, it can keep tensors as it likes.
    """
    constants = [getattr(traced, str(n.target)) for n in traced.graph.nodes if n.op == "get_attr"]
    known = {id(c) for c in constants}
    kept = [v for v in made.alive() if id(v) not in known]
    kept += [c for c in constants if isinstance(c, torch_compat.FakeTensor)]
    if kept:
        kind = format_kind(kept[0].shape, kept[0].dtype, kept[0].device)
        raise UntraceableError(
            f"{which} kept a tensor that was only traced ({kind}), beside what it returned"
        )


@contextlib.contextmanager
def _tracing(mode: Any) -> Iterator[None]:
    """Operators run on fake tensors; real ones that hooks close over become constants."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch_compat.DisableAutocast())
        if mode is not None:
            before = mode.allow_non_fake_inputs
            mode.allow_non_fake_inputs = True
            stack.callback(setattr, mode, "allow_non_fake_inputs", before)
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch_compat.enable_python_dispatcher())
        yield


def _laid_out_as(saved: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
    """What unpack returned, in the layout of the tensor that was packed."""
    long = [d for d in range(saved.dim()) if not statically_known_true(returned.shape[d] == 1)]
    if all(statically_known_true(returned.stride(d) == saved.stride(d)) for d in long):
        return returned
    order = sorted(range(saved.dim()), key=lambda d: -hint(saved.stride(d)))
    back = [order.index(d) for d in range(saved.dim())]
    return returned.permute(order).contiguous().permute(back)
