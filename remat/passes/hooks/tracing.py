"""Trace saved-tensor hooks as FX graphs, once for each shape, layout, dtype and device of tensors."""

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
from remat.graph.memory.storages import SYMBOLIC, Sizes, hint
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
    """A pair of saved-tensor hooks as FX graphs, for tensors of one shape, layout, dtype and device.

    Attributes:
        pack: takes the saved tensor and returns the tensors and sizes to hand over to backward.
        unpack: takes the results of ``pack`` and returns the unpacked tensor. Constants that the
            pack hook returned are part of the graph. None if the pack hook returned the tensor
            itself, which declines packing.
        eager: why the hooks run outside the graph; empty if the hooks are part of the graph.
    """

    pack: fx.GraphModule
    unpack: fx.GraphModule | None
    eager: str = ""

    @property
    def packed_bytes(self) -> int:
        """Bytes of the storages that forward hands to backward instead of the saved tensor."""
        packed_values: Any = output_node(self.pack.graph).args[0]
        return sum(Sizes().of_all(n for n in packed_values if isinstance(n, fx.Node)).values())


@dataclass(slots=True, eq=False)
class Traces:
    """Cached traces of one pair of hooks: one trace for each shape, layout, dtype and device of tensors.

    Attributes:
        hooks: the pair of saved-tensor hooks.
        lower: the lowering of the graph, such as ``"inductor"``. The lowering decides which
            operators a trace may have.
    """

    hooks: SavedTensorHooks
    lower: str
    _traced: dict[tuple[Any, ...], Traced] = field(default_factory=dict)

    def of(self, value: torch.Tensor) -> Traced:
        """Return the traced hooks for tensors like the fake tensor ``value``.

        Raises:
            PlanError: a hook writes to its argument, or unpack returns no tensor of the size, dtype
                and device of ``value``.
        """
        kind = (tuple(value.shape), value.stride(), value.dtype, value.device)
        if not all(type(s) is int for s in (*value.shape, *value.stride())):
            return self._trace(value)  # not cached: tracing may add guards on this graph's symbols
        if kind not in self._traced:
            self._traced[kind] = self._trace(value)
        return self._traced[kind]

    def _trace(self, value: torch.Tensor) -> Traced:
        """Trace the hooks as FX graphs for tensors like ``value``."""
        try:
            return trace(self.hooks, value, self.lower)
        except UntraceableError as error:
            # Custom operators call the hooks outside the graph, on real tensors.
            return replace(trace(_eager(self.hooks), value, self.lower), eager=str(error))


class UntraceableError(RematError):
    """Raised if saved-tensor hooks cannot be traced as part of a graph; the message says why."""


def _eager(hooks: SavedTensorHooks) -> SavedTensorHooks:
    """Return hooks that can be traced, and that call the original hooks inside custom operators."""
    from remat.passes.packing.eager import pack_eagerly, unpack_eagerly

    key = register(hooks)
    return replace(
        hooks,
        pack=lambda x: (pack_eagerly(x, key), (tuple(x.shape), x.stride(), x.dtype, x.device)),
        unpack=lambda packed: unpack_eagerly(packed[0], key, *packed[1]),
    )


def trace(hooks: SavedTensorHooks, value: torch.Tensor, lower: str) -> Traced:
    """Trace pack and unpack for tensors like the fake tensor ``value``.

    Args:
        hooks: the hooks.
        value: a fake tensor with the size, strides, dtype and device to trace for.
        lower: as in `Traces`.

    Raises:
        UntraceableError: the hooks cannot be part of a graph.
        PlanError: as in `Traces.of`.
    """
    constants: list[Any] = []
    structure: list[pytree.TreeSpec] = []

    def pack(x: torch.Tensor) -> tuple[Any, ...]:
        with naming("pack", UntraceableError):
            returned = hooks.pack(x)
        leaves, spec = pytree.tree_flatten(returned)
        constants[:] = [_PACKED_VALUE if _is_packed_value(v) else v for v in leaves]
        structure[:] = [spec]
        return tuple(v for v in leaves if _is_packed_value(v))

    def unpack(*packed_values: Any) -> torch.Tensor:
        values = iter(packed_values)
        leaves = [next(values) if c is _PACKED_VALUE else c for c in constants]
        with naming("unpack", UntraceableError):
            returned = hooks.unpack(structure[0].unflatten(leaves))
        kind = value.shape, value.dtype, value.device
        return _laid_out_as(value, check_unpacked(hooks.name, returned, *kind))

    graph = partial(_graph, hooks=hooks, lower=lower, mode=getattr(value, "fake_mode", None))
    packing = graph(pack, [value], "pack")
    packed = packing.graph
    packed_values: Any = output_node(packed).args[0]
    if list(packed_values) == [next(iter(packed.nodes))] and constants == [_PACKED_VALUE]:
        return Traced(pack=packing, unpack=None)
    given = [n.meta["val"] if isinstance(n, fx.Node) else n for n in packed_values]
    if any(isinstance(v, (torch.SymBool, int)) or free_unbacked_symbols(v) for v in given):
        raise UntraceableError("pack returns a number or a size that depends on data")
    unpacking = graph(unpack, given, "unpack")
    return Traced(pack=packing, unpack=unpacking)


#: Marker in the list of pack's results for a value that forward hands to backward. All other entries of
#: the list are constants.
_PACKED_VALUE = object()
#: Operators that are removed from traces. They only matter to autograd, and traced hooks are not
#: differentiated. PyTorch 2.15 traces detach as alias.
_THE_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _is_packed_value(leaf: Any) -> bool:
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
    """Trace a hook and return an FX module in which no operator writes in place."""
    recorder = _TraceRecorder()
    traced = _traced(function, inputs, lower, mode, recorder)
    _refuse_kept(which, traced, recorder)
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
    recorder: _TraceRecorder | None = None,
) -> fx.GraphModule:
    """Trace a function with ``make_fx`` and return the FX module."""
    table = torch_compat.select_decomp_table() if lower == "inductor" else None
    trace_it = make_fx(function, table, _disable_torch_fn_metadata_mode=True)
    inputs = [_own(v) for v in inputs]
    with _tracing(mode), recorder or contextlib.nullcontext():
        if recorder is not None:
            recorder.note(inputs)
        try:
            return trace_it(*inputs)
        except RematError:
            raise
        except Exception as error:  # user code may do anything that a trace cannot follow
            raise UntraceableError(summary(error)) from error


def _own(value: Any) -> Any:
    """Return a new fake tensor, detached from the fake tensor ``value``; return any other value unchanged."""
    # Only the traced function can refer to the new tensor, so `_refuse_kept` detects that it keeps the tensor.
    fake = isinstance(value, torch_compat.FakeTensor)
    return torch_compat.fast_detach(value.fake_mode, value) if fake else value


class _TraceRecorder(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records, by weak references, the tensors that a trace receives and creates."""

    # Otherwise PyTorch refuses to run higher-order operators under the mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[TensorWeakRef] = []

    def note(self, values: Any) -> None:
        """Record weak references to the fake tensors among the leaves of ``values``."""
        leaves = pytree.tree_leaves(values)
        fakes = (v for v in leaves if isinstance(v, torch_compat.FakeTensor))
        self._noted.extend(map(TensorWeakRef, fakes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.note(returned)
        return returned

    def alive(self) -> list[torch.Tensor]:
        """Return the recorded tensors that are still referenced."""
        if all(ref() is None for ref in self._noted):
            return []
        # A tensor that only a reference cycle keeps alive is not stored by the hook.
        gc.collect()
        return [tensor for ref in self._noted if (tensor := ref()) is not None]


def _refuse_kept(which: str, traced: fx.GraphModule, recorder: _TraceRecorder) -> None:
    """Raise an error if a hook has kept a reference to a fake tensor, which exists only during the trace."""
    constants = [getattr(traced, str(n.target)) for n in traced.graph.nodes if n.op == "get_attr"]
    constant_ids = {id(c) for c in constants}
    retained = [v for v in recorder.alive() if id(v) not in constant_ids]
    retained += [c for c in constants if isinstance(c, torch_compat.FakeTensor)]
    if retained:
        kind = format_kind(retained[0].shape, retained[0].dtype, retained[0].device)
        raise UntraceableError(
            f"{which} kept a tensor that was only traced ({kind}), beside what it returned"
        )


@contextlib.contextmanager
def _tracing(mode: Any) -> Iterator[None]:
    """Set up the tracing of hooks on fake tensors inside the ``with`` block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch_compat.DisableAutocast())
        if mode is not None:
            before = mode.allow_non_fake_inputs
            # Real tensors that the hooks close over become constants of the graph.
            mode.allow_non_fake_inputs = True
            stack.callback(setattr, mode, "allow_non_fake_inputs", before)
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch_compat.enable_python_dispatcher())
        yield


def _laid_out_as(saved: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
    """Return the unpack hook's result in the saved tensor's memory layout, as a copy if the strides differ."""
    # The stride of a dimension of size 1 has no meaning.
    long = [d for d in range(saved.dim()) if not statically_known_true(returned.shape[d] == 1)]
    if all(statically_known_true(returned.stride(d) == saved.stride(d)) for d in long):
        return returned
    order = sorted(range(saved.dim()), key=lambda d: -hint(saved.stride(d)))
    back = [order.index(d) for d in range(saved.dim())]
    return returned.permute(order).contiguous().permute(back)
