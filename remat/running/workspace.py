"""What an operator takes while it runs, beyond what it returns: asked of the device, once for each kind of call.

Convolutions, batch norms, pooling, attention, and some products lay their inputs out anew, or keep partial results, in memory that no graph
shows. How much that is depends on the library, the device and the sizes; a call on tensors without meaning tells.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from remat import torch_compat
from remat.graph.storages import hint, tensor_bytes
from remat.running.measure import allocations
from remat.torch_compat import pytree

#: Bytes of inputs and results beyond which an operator is not run for this.
MOST_BYTES = 2 << 30
#: Operators of PyTorch whose kernels on a CPU allocate for themselves.
_ALLOCATE = (
    "conv", "batch_norm", "attention", "linear", "rnn", "gru", "lstm", "sort", "fft", "pool", "embedding_bag",
    "bernoulli", "native_dropout",
)  # fmt: skip
#: Products that do so where numbers are of 16 bits, or complex.
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
_known: dict[Any, int] = {}


def may_allocate(op: Any, dtype: torch.dtype) -> bool:
    """Whether an operator of PyTorch's is one of those known to allocate for itself, for numbers of a type."""
    name = str(op).replace("::", ".")
    if not name.startswith(("aten.", "mkldnn.")):
        return False
    narrow = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 2)
    return any(part in name for part in _ALLOCATE) or (narrow and name.startswith(_PRODUCTS))


def workspace_bytes(op: Any, args: Any, kwargs: Any, results: Any) -> int:
    """Bytes that a call of an operator has allocated at most, beyond its results.

    0 where it is not one of those known to allocate, where it is not on a CPU, or where it is too large to try.

    Args:
        op: an overload of an operator.
        args: its arguments; fake tensors stand for tensors.
        kwargs: likewise.
        results: what it returns for them.
    """
    tensors = [v for v in pytree.tree_leaves((args, kwargs, results)) if _is_tensor(v)]
    if not any(may_allocate(op, t.dtype) for t in tensors):
        return 0
    if any(t.device.type != "cpu" for t in tensors) or sum(map(tensor_bytes, tensors)) > MOST_BYTES:
        return 0
    key = repr((str(op), pytree.tree_map(_described, (args, kwargs)), torch.get_num_threads()))
    if key not in _known:
        try:
            _known[key] = _measured(op, args, kwargs)
        except Exception:  # no kernel for such tensors, or somebody else is profiling
            _known[key] = 0
    return _known[key]


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
    with torch_compat.unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):

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
