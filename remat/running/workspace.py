"""Workspace bytes of operators, measured on the device once for each kind of call.

Convolutions, batch norms, pooling, attention, and some products lay their inputs out anew, or keep partial results, in memory that no graph
shows. How much that is depends on the library, the device and the sizes; a call on tensors without meaning tells.
A large call does not run. Its workspace is extrapolated from two smaller batches, since it grows linearly with the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from remat import torch_compat
from remat.errors import PeakWarning, warn
from remat.graph.costs.measure import undisturbed
from remat.graph.storages import WORKSPACE, extent_of, hint, tensor_bytes, tensors_of
from remat.running.measure import allocations
from remat.torch_compat import pytree
from remat.units import format_bytes

#: Bytes of inputs and results beyond which smaller batches run instead of a call.
MOST_BYTES = 8 << 20
#: The same where no smaller batches tell; beyond that nothing runs.
_MOST_AT_ONCE = 256 << 20
#: Samples that smaller batches have at least, if the call has as many.
_LEAST_SAMPLES = 4
#: The same of convolutions with a kernel of one element, on one thread: oneDNN runs none with less than half of these.
_LEAST_OF_ONE_ELEMENT = 32
#: Bytes that numbers among the arguments take as tensors, which are not counted.
_NUMBERS = 16
#: Operators on elements, of which any dimension may be made smaller.
_ON_ELEMENTS = ("bernoulli", "dropout")
#: Arguments that have no batch.
_NO_BATCH = ("weight", "bias", "running", "save_mean", "save_invstd", "save_var", "reserve")
#: Operators of PyTorch whose kernels on a CPU allocate for themselves.
_ALLOCATE = (
    "conv", "batch_norm", "attention", "linear", "rnn", "gru", "lstm", "sort", "fft", "pool", "embedding_bag",
    "bernoulli", "native_dropout",
)  # fmt: skip
#: Products that do so where numbers are of 16 bits, or complex.
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
#: Operators that take nothing where numbers are real, of 32 bits or more, and lie densely; beside those on elements.
_TAKE_NOTHING = ("mm", "addmm", "bmm", "clone", "copy", "copy_", "empty", "full", "zeros", "ones", "empty_like",
    "full_like", "zeros_like", "ones_like", "new_empty", "new_empty_strided", "new_full", "new_zeros", "new_ones",
)  # fmt: skip
_CACHE: dict[Any, int] = {}
#: Held while a call is measured: PyTorch has one profiler, and a second measurement beside it would fail.
_LOCK = threading.Lock()


def may_allocate(op: Any, dtype: torch.dtype) -> bool:
    """Whether an operator of PyTorch's is one of those known to allocate for itself, for numbers of a type."""
    name = str(op).replace("::", ".")
    if not name.startswith(("aten.", "mkldnn.")):
        return False
    narrow = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 2)
    return any(part in name for part in _ALLOCATE) or (narrow and name.startswith(_PRODUCTS))


def workspace_bytes(op: Any, args: Any, kwargs: Any, results: Any) -> int:
    """Bytes that a call of an operator has allocated at most, beyond its results.

    0 where it is not one of those known to allocate, where it is not on a CPU, and, with a warning, where it is too
    large to try.

    Args:
        op: an overload of an operator.
        args: its arguments; fake tensors stand for tensors.
        kwargs: likewise.
        results: what it returns for them.
    """
    tensors = tensors_of((args, kwargs, results))
    if not any(may_allocate(op, t.dtype) for t in tensors):
        return 0
    return _cached(op, args, kwargs, tensors)


def _cached(op: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> int:
    """The workspace of a call, measured once for each kind of call.

    Args:
        op: an overload of an operator.
        args: its arguments.
        kwargs: likewise.
        tensors: the tensors that it reads and returns.
    """
    if torch_compat.is_profiling():
        warn(
            "what operators take beside their results is not counted in peaks: a profiler runs while a step is "
            "planned, and to measure would end it. Run a step before profiling",
            PeakWarning,
            stacklevel=2,
        )
        return 0
    if any(t.device.type != "cpu" for t in tensors):
        return 0
    key = repr((str(op), pytree.tree_map(_described, (args, kwargs)), torch.get_num_threads()))
    with _LOCK:
        if key not in _CACHE:
            try:
                _CACHE[key] = _estimated(op, args, kwargs, sum(map(tensor_bytes, tensors)))
            except Exception:  # no kernel for such tensors, or somebody else is profiling
                _CACHE[key] = 0
        return _CACHE[key]


def _estimated(op: Any, args: Any, kwargs: Any, together: int) -> int:
    """The workspace of a call whose inputs and results have ``together`` bytes: measured, or from smaller batches."""
    if together > MOST_BYTES:
        batches = _batches(op, args, kwargs, together)
        if batches is not None:
            few, more, samples, of = batches
            if _allocated(of(more)) <= _MOST_AT_ONCE:
                taken = [_measured(op, *of(n)) for n in (few, more)]
                return max(0, taken[1] + (taken[1] - taken[0]) * (samples - more) // (more - few))
    # Arguments with gaps between their elements take more memory than they have elements.
    together = max(together, _allocated((args, kwargs)))
    if together > _MOST_AT_ONCE:
        warn(
            f"what {op} takes beside its results is not counted in peaks: its inputs and results have "
            f"{format_bytes(together)}, and it is not run on more than {format_bytes(_MOST_AT_ONCE)} while a step "
            "is planned. Leave that much of the memory out of the budget",
            PeakWarning,
            stacklevel=2,
        )
        return 0
    return _measured(op, args, kwargs)


def _allocated(arguments: Any) -> int:
    """Bytes that `_measured` allocates for the tensors among some arguments."""
    return sum(extent_of(v) * v.element_size() for v in tensors_of(arguments))


def _batches(
    op: Any, args: Any, kwargs: Any, together: int
) -> tuple[int, int, int, Callable[[int], Any]] | None:
    """Two smaller batch sizes, the call's own, and its arguments at a batch size.

    None: the call has no batch, or its batch is small already.
    """
    names = [a.name for a in torch_compat.schema(op).arguments]
    first: Any = args[0] if args else None
    if kwargs or not _is_tensor(first) or not first.dim():
        return None
    sizes = _numbers(first.shape)
    on_elements = any(part in str(op) for part in _ON_ELEMENTS)
    axis = sizes.index(max(sizes)) if on_elements else 0
    samples = sizes[axis]
    weights = [
        v for v, name in zip(args, names, strict=False) if name == "weight" and _is_tensor(v)
    ]
    of_one = any(set(_numbers(w.shape[2:])) == {1} for w in weights)
    alone = "conv" in str(op) and of_one and torch.get_num_threads() == 1
    least = _LEAST_OF_ONE_ELEMENT if alone else _LEAST_SAMPLES
    more = max(least, samples * MOST_BYTES // together)
    if more >= samples or more * together // samples > _MOST_AT_ONCE:
        return None

    def of(n: int) -> tuple[Any, Any]:
        return tuple(
            _with_samples(value, axis, n)
            if _is_tensor(value)
            and not name.startswith(_NO_BATCH)
            and len(value.shape) > axis
            and hint(value.shape[axis]) == samples
            else value
            for value, name in zip(args, names, strict=False)
        ), kwargs

    return more // 2, more, samples, of


def _with_samples(value: torch.Tensor, axis: int, n: int) -> torch.Tensor:
    """A tensor without memory, like another but with ``n`` samples along an axis."""
    size, stride = map(list, map(_numbers, (value.shape, value.stride())))
    dense, at = [0] * len(size), 1
    size[axis] = n
    for k in sorted(range(len(size)), key=lambda k: (stride[k], -k)):
        dense[k], at = (at, at * size[k]) if stride[k] else (0, at)
    return torch.empty_strided(size, dense, dtype=value.dtype, device="meta")


def note_workspaces(graph: fx.Graph) -> None:
    """Write the workspaces of operators into the metadata of their nodes, under `WORKSPACE`.

    Operators that draw random numbers, or are known to allocate, have an entry even if it is 0: a replayed draw
    adds its generator state to the entry, and other machines may need more.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch_compat.OpOverload):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        call = args, kwargs, node.meta.get("val")
        tensors = tensors_of(call)
        if not _may_take(node.target, tensors):
            continue
        nbytes = _cached(node.target, args, kwargs, tensors)
        draws = torch.Tag.nondeterministic_seeded in node.target.tags
        if nbytes > _NUMBERS or draws or any(may_allocate(node.target, t.dtype) for t in tensors):
            node.meta[WORKSPACE] = in_proportion(nbytes, call)


def _may_take(op: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an operator of PyTorch may have a workspace: all but those known to have none."""
    if not tensors or op.namespace != "aten" or op.is_view or torch.Tag.inplace_view in op.tags:
        return False
    on_elements = torch.Tag.pointwise in op.tags
    if any(may_allocate(op, t.dtype) for t in tensors):
        return True
    if torch.Tag.nondeterministic_seeded in op.tags:
        return True
    if not on_elements and op.overloadpacket.__name__ not in _TAKE_NOTHING:
        return True
    return any(
        t.dtype.is_complex
        or (t.dtype.is_floating_point and t.dtype.itemsize == 2 and not on_elements)
        or not _is_dense(t)
        for t in tensors
    )


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor has no gaps, and no two elements in one place."""
    at = 1
    for stride, size in sorted(zip(*map(_numbers, (value.stride(), value.shape)), strict=True)):
        if size != 1:
            if stride != at:
                return False
            at *= size
    return True


def in_proportion(nbytes: int, values: Any) -> Any:
    """Bytes as an expression, in proportion to the bytes of those tensors whose sizes are symbols."""
    sizes: list[Any] = [t.numel() * t.element_size() for t in tensors_of(values)]
    together: Any = sum(n for n in sizes if isinstance(n, torch.SymInt))
    return (
        nbytes * together // max(1, hint(together))
        if isinstance(together, torch.SymInt)
        else nbytes
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(_number(value))
    return (*map(_numbers, (value.shape, value.stride())), value.dtype)


def _numbers(sizes: Any) -> tuple[int, ...]:
    return tuple(map(hint, sizes))


def _number(value: Any) -> Any:
    return hint(value) if isinstance(value, torch.SymInt) else value


def _measured(op: Callable[..., Any], args: Any, kwargs: Any) -> int:
    with undisturbed(torch.device("cpu")):

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return _number(value)
            size, stride = map(_numbers, (value.size(), value.stride()))
            made = torch.empty_strided(size, stride, dtype=value.dtype)
            return made.zero_()

        args, kwargs = pytree.tree_map(real, (args, kwargs))
        op(*args, **kwargs)  # what a first call sets up stays
        with allocations() as events:
            results = op(*args, **kwargs)
    alive = [*accumulate(nbytes or 0 for nbytes in events)] or [0]
    del results
    return max(alive) - alive[-1]
