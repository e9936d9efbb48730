"""Measure the workspace bytes of operators on the CPU, once for each kind of call.

A workspace is the memory that an operator allocates beyond its results and frees before it returns. Convolutions, batch
norms, pooling, attention and some matrix products use a workspace to copy inputs into another layout, or to keep
partial results. No graph shows workspaces, and the size of a workspace depends on the library, the device and the
shapes. To measure a workspace, the operator is called on tensors of zeros. Calls of one kind have the same operator,
sizes, strides, dtypes, numeric arguments and thread count.

If a call with a batch axis is too large to run, its workspace is extrapolated from two smaller batches. Workspaces grow
linearly with the batch size.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PeakWarning, warn
from remat.graph import ops
from remat.graph.costs.base import Forms, signature_of
from remat.graph.costs.measure import undisturbed
from remat.graph.memory.storages import (
    MEASURE,
    WORKSPACE,
    extent_of,
    hint,
    tensor_bytes,
    tensors_of,
)
from remat.running.measure import allocations
from remat.torch_compat import pytree
from remat.units import format_bytes

#: Limit in bytes on inputs and results of a measured call. A larger call is measured with two smaller batches.
MOST_BYTES = 8 << 20
#: Limit in bytes on a call whose batch cannot be made smaller. A larger call is not measured.
_MOST_AT_ONCE = 256 << 20
#: Fewest samples of the larger of the two batches from which a workspace is extrapolated.
_LEAST_SAMPLES = 4
#: `_LEAST_SAMPLES` for convolutions whose kernel has one element, on one thread. The smaller batch then has 16 samples.
#: With fewer samples, oneDNN does not run these convolutions.
_LEAST_OF_ONE_ELEMENT = 32
#: Workspaces of at most this many bytes are ignored. PyTorch needs them to convert number arguments to tensors.
_NUMBERS = 16
#: Parts of names of elementwise operators. Any dimension of their arguments can serve as the batch.
_ON_ELEMENTS = ("bernoulli", "dropout")
#: Prefixes of the names of arguments without a batch dimension.
_NO_BATCH = ("weight", "bias", "running", "save_mean", "save_invstd", "save_var", "reserve")
#: Parts of names of PyTorch's operators whose CPU kernels allocate internally.
_ALLOCATE = (
    "conv", "batch_norm", "attention", "linear", "rnn", "gru", "lstm", "sort", "fft", "pool", "embedding_bag",
    "bernoulli", "native_dropout",
)  # fmt: skip
#: Matrix products whose CPU kernels allocate internally for 16-bit or complex numbers.
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
#: Operators, besides elementwise ones, without a workspace for dense tensors of real numbers with at
#: least 32 bits.
_WITHOUT_WORKSPACE = ("mm", "addmm", "bmm", "clone", "copy", "copy_", "empty", "full", "zeros", "ones", "empty_like",
    "full_like", "zeros_like", "ones_like", "new_empty", "new_empty_strided", "new_full", "new_zeros", "new_ones",
)  # fmt: skip
#: Measured workspaces in bytes, by kind of call.
_CACHE: dict[Any, int] = {}
#: Lock that a measurement holds. PyTorch has one profiler, so a second measurement at the same time would fail.
_LOCK = threading.Lock()


@functools.cache
def may_allocate(op: Any, dtype: torch.dtype) -> bool:
    """Return whether an operator, given as an object or by name, is known to have workspaces on a CPU for a dtype."""
    name = str(op).replace("::", ".")
    if not name.startswith(("aten.", "mkldnn.")):
        return False
    narrow = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 2)
    return any(part in name for part in _ALLOCATE) or (narrow and name.startswith(_PRODUCTS))


def workspace_bytes(op: Any, args: Any, kwargs: Any, results: Any) -> int:
    """Return the workspace bytes of an operator call: the peak of its allocations beyond its results.

    The returned number is 0 if the operator is not known to have a workspace, or the call is not on a CPU. If the call
    is too large to run, or a profiler is already running, the returned number is 0 and a warning is given.

    Args:
        op: an overload of an operator.
        args: positional arguments; fake tensors stand for tensors.
        kwargs: keyword arguments; fake tensors stand for tensors.
        results: results of the call, as fake tensors.
    """
    tensors = tensors_of((args, kwargs, results))
    if not any(may_allocate(op, t.dtype) for t in tensors):
        return 0
    return _cached(op, args, kwargs, tensors)


def _cached(op: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> int:
    """Return the workspace bytes of an operator call, from a cache with one measurement for each kind of call."""
    if torch_compat.is_profiling():
        warn(
            "what operators take beside their results is not counted in peaks: a profiler runs while a step is "
            "planned, and to measure would end it. Run a step before profiling",
            PeakWarning,
        )
        return 0
    if ops.reads_private_memory(op) or any(t.device.type != "cpu" for t in tensors):
        return 0
    key = repr((str(op), pytree.tree_map(_described, (args, kwargs)), torch.get_num_threads()))
    with _LOCK:
        if key not in _CACHE:
            # A call whose measurement fails counts as 0 bytes.
            try:
                _CACHE[key] = _estimated(op, args, kwargs, sum(map(tensor_bytes, tensors)))
            except Exception:  # no kernel for such tensors, or another profiler runs
                _CACHE[key] = 0
        return _CACHE[key]


def _estimated(op: Any, args: Any, kwargs: Any, nbytes: int) -> int:
    """Return the workspace bytes, measured or extrapolated, of an operator call on ``nbytes`` bytes of tensors."""
    if nbytes > MOST_BYTES:
        batches = _batches(op, args, kwargs, nbytes)
        if batches is not None:
            small, large, samples, with_batch = batches
            if _allocated(with_batch(large)) <= _MOST_AT_ONCE:
                measured = [_measured(op, *with_batch(n)) for n in (small, large)]
                return max(
                    0,
                    measured[1]
                    + (measured[1] - measured[0]) * (samples - large) // (large - small),
                )
    # Arguments with gaps between their elements take more memory than the elements alone.
    nbytes = max(nbytes, _allocated((args, kwargs)))
    if nbytes > _MOST_AT_ONCE:
        warn(
            f"what {op} takes beside its results is not counted in peaks: its inputs and results have "
            f"{format_bytes(nbytes)}, and it is not run on more than {format_bytes(_MOST_AT_ONCE)} while a step "
            "is planned. Leave that much of the memory out of the budget",
            PeakWarning,
        )
        return 0
    return _measured(op, args, kwargs)


def _allocated(arguments: Any) -> int:
    """Return the bytes that `_measured` allocates for the tensors among ``arguments``."""
    return sum(extent_of(v) * v.element_size() for v in tensors_of(arguments))


def _batches(
    op: Any, args: Any, kwargs: Any, nbytes: int
) -> tuple[int, int, int, Callable[[int], Any]] | None:
    """Return two small batch sizes, the call's batch size, and a function that makes arguments; None if impossible."""
    # Later zips are not strict, because a call may leave out arguments with defaults.
    names = [a.name for a in torch_compat.schema(op).arguments]
    first: Any = args[0] if args else None
    if kwargs or not isinstance(first, torch.Tensor) or not first.dim():
        return None
    sizes = _numbers(first.shape)
    on_elements = any(part in str(op) for part in _ON_ELEMENTS)
    axis = sizes.index(max(sizes)) if on_elements else 0
    samples = sizes[axis]
    weights = [
        v
        for v, name in zip(args, names, strict=False)
        if name == "weight" and isinstance(v, torch.Tensor)
    ]
    has_one_element = any(set(_numbers(w.shape[2:])) == {1} for w in weights)
    one_thread_convolution = "conv" in str(op) and has_one_element and torch.get_num_threads() == 1
    least = _LEAST_OF_ONE_ELEMENT if one_thread_convolution else _LEAST_SAMPLES
    large = max(least, samples * MOST_BYTES // nbytes)
    if large >= samples or large * nbytes // samples > _MOST_AT_ONCE:
        return None

    def with_batch(n: int) -> tuple[Any, Any]:
        return tuple(
            _with_samples(value, axis, n)
            if isinstance(value, torch.Tensor)
            and not name.startswith(_NO_BATCH)
            and len(value.shape) > axis
            and hint(value.shape[axis]) == samples
            else value
            for value, name in zip(args, names, strict=False)
        ), kwargs

    return large // 2, large, samples, with_batch


def _with_samples(value: torch.Tensor, axis: int, n: int) -> torch.Tensor:
    """Return a meta tensor like ``value``, but with ``n`` samples along the axis of the batch."""
    size, stride = map(list, map(_numbers, (value.shape, value.stride())))
    dense, at = [0] * len(size), 1
    size[axis] = n
    # The order of the strides stays, without gaps between elements.
    for k in sorted(range(len(size)), key=lambda k: (stride[k], -k)):
        dense[k], at = (at, at * size[k]) if stride[k] else (0, at)
    return torch.empty_strided(size, dense, dtype=value.dtype, device="meta")


def note_workspaces(graph: fx.Graph) -> None:
    """Write the workspace bytes of a graph's operators into the metadata of their nodes, under the key `WORKSPACE`."""
    defer_workspaces(graph, compiled=False)
    measure_deferred(graph)


def measure_deferred(graph: fx.Graph) -> None:
    """Call the functions that `defer_workspaces` stored, once per kind of call, and store workspace bytes instead."""
    forms, measured = Forms(), dict[Any, Any]()
    for node in graph.nodes:
        if node.meta.get(WORKSPACE) is _workspace:
            call = signature_of(node, forms)
            if call not in measured:
                measured[call] = _workspace(node)
            if measured[call] is None:
                del node.meta[WORKSPACE]
            else:
                node.meta[WORKSPACE] = measured[call]


def defer_workspaces(graph: fx.Graph, *, compiled: bool) -> None:
    """Store functions in the metadata of a graph's nodes; each measures the workspace of its node when called.

    Args:
        graph: the graph.
        compiled: whether Inductor compiles the graph. If True, the functions stand under the key
            `MEASURE`, otherwise under `WORKSPACE`.
    """
    for node in graph.nodes:
        op: Any = node.target
        if not isinstance(op, torch_compat.OpOverload):
            continue
        if not compiled:
            if _has_allocations(op):
                node.meta[WORKSPACE] = _workspace
        # Compiled code calls few operators of PyTorch, and in layouts that depend on the plan.
        elif any(may_allocate(op, dtype) for dtype in (torch.float32, torch.bfloat16)):
            call = _call(node)
            if any(may_allocate(op, t.dtype) for t in tensors_of(call)):
                node.meta[MEASURE] = functools.cache(functools.partial(_compiled, op, call))


@functools.cache
def _has_allocations(op: Any) -> bool:
    """Return whether any call of an operator may have a workspace; `_may_have_workspace` judges one call."""
    return op.namespace == "aten" and not (op.is_view or torch.Tag.inplace_view in op.tags)


def _call(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return the positional arguments, keyword arguments and results of a node, as fake values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return args, kwargs, node.meta.get("val")


def _workspace(node: fx.Node) -> Any:
    """Return the workspace bytes of a node, as a number or a symbolic size; None if its metadata needs no entry."""
    call, op = _call(node), cast(Any, node.target)
    tensors = tensors_of(call)
    # Calls that draw random numbers or are known to allocate get an entry even for 0 bytes: a repeated draw adds the
    # generator's state, and another machine may need more memory.
    draws = torch.Tag.nondeterministic_seeded in op.tags
    is_certain = draws or any(may_allocate(op, t.dtype) for t in tensors)
    if not is_certain and not _may_have_workspace(op, tensors):
        return None
    nbytes = _cached(op, *call[:2], tensors)
    return in_proportion(nbytes, call) if is_certain or nbytes > _NUMBERS else None


def _compiled(op: Any, call: tuple[Any, Any, Any], channels_last: bool) -> Any:
    """Return the workspace bytes of a compiled call; if ``channels_last``, 4-d arguments are channels-last."""
    args, kwargs = pytree.tree_map(_channels_last, call[:2]) if channels_last else call[:2]
    return in_proportion(_cached(op, args, kwargs, tensors_of(call)), call)


def _channels_last(value: Any) -> Any:
    """Return a four-dimensional tensor in channels-last format; other values and expanded tensors unchanged."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or 0 in _numbers(value.stride()):
        return value
    return torch.empty(
        _numbers(value.shape),
        dtype=value.dtype,
        device="meta",
        memory_format=torch.channels_last,
    )


def _may_have_workspace(op: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """For an operator with `_has_allocations`, return whether a call with these tensors may have a workspace."""
    if not tensors:
        return False
    # An elementwise operator, or one of `_WITHOUT_WORKSPACE`, allocates only in the special cases below.
    on_elements = torch.Tag.pointwise in op.tags
    if not on_elements and op.overloadpacket.__name__ not in _WITHOUT_WORKSPACE:
        return True
    return any(
        t.dtype.is_complex
        or (t.dtype.is_floating_point and t.dtype.itemsize == 2 and not on_elements)
        or not _is_dense(t)
        for t in tensors
    )


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor elements that share memory."""
    at = 1
    for stride, size in sorted(zip(*map(_numbers, (value.stride(), value.shape)), strict=True)):
        if size != 1:
            if stride != at:
                return False
            at *= size
    return True


def in_proportion(nbytes: int, values: Any) -> Any:
    """Return a symbolic number of bytes that is proportional to the bytes of the tensors in ``values``.

    ``nbytes`` is the result if each symbolic size equals its hint, or if no size is symbolic.
    """
    sizes: list[Any] = [t.numel() * t.element_size() for t in tensors_of(values)]
    together: Any = sum(n for n in sizes if isinstance(n, torch.SymInt))
    return (
        nbytes * together // max(1, hint(together))
        if isinstance(together, torch.SymInt)
        else nbytes
    )


def _described(value: Any) -> Any:
    """Return a cache key for an argument: a tensor's sizes, strides and dtype, or the ``repr`` of any other value."""
    if not isinstance(value, torch.Tensor):
        return repr(_number(value))
    return (*map(_numbers, (value.shape, value.stride())), value.dtype)


def _numbers(sizes: Any) -> tuple[int, ...]:
    """Return sizes or strides as ints; a symbolic size becomes its hint."""
    return tuple(map(hint, sizes))


def _number(value: Any) -> Any:
    """Return the hint of a symbolic int; any other value unchanged."""
    return hint(value) if isinstance(value, torch.SymInt) else value


def _measured(op: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """Return the workspace bytes of an operator call, measured on zero tensors with the call's sizes and strides."""
    with undisturbed(torch.device("cpu")):

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return _number(value)
            size, stride = map(_numbers, (value.size(), value.stride()))
            zeros = torch.empty_strided(size, stride, dtype=value.dtype)
            return zeros.zero_()

        args, kwargs = pytree.tree_map(real, (args, kwargs))
        # A first call may allocate memory that is not freed, so it is not measured.
        op(*args, **kwargs)
        with allocations() as events:
            results = op(*args, **kwargs)
    alive = [*accumulate(events)] or [0]
    del results
    return max(alive) - alive[-1]
