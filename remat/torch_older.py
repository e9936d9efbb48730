"""Substitutes for parts of newer PyTorch versions that older versions lack.

`remat.torch_compat` names the versions that need each substitute, and uses them where a name is missing.
Private names of PyTorch that only older versions have are used in this file only.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remat import torch_compat

if TYPE_CHECKING:
    import torch

#: Key of region budgets in graphs that newer versions traced and an older version reads.
REGION_BUDGET_KEY = "_region_activation_memory_budget"


def is_on_cuda(device: torch.device) -> bool:
    """Return whether a device is a CUDA device, the only kind with graph-safe generators before PyTorch 2.13."""
    return device.type == "cuda"


def default_cuda_generator(device: torch.device) -> Any:
    """Return the default generator of a CUDA device."""
    import torch

    return torch.cuda.default_generators[device.index]


def size_within_bounds(size: Any, fallback: int | None = None) -> int:
    """Return a number for a symbolic size, in place of ``optimization_hint``, which PyTorch 2.11 lacks.

    Args:
        size: the size.
        fallback: number for each symbol that depends on data, if the symbol's bounds allow this number.
    """
    if type(size) is int:
        return size
    node: Any = size.node
    if node.has_hint():
        return int(node.hint)
    env, numbers = node.shape_env, {}
    for symbol in node.expr.free_symbols:
        number, bounds = env.backed_var_to_val.get(symbol), env.bound_sympy(symbol)
        within = max(fallback or 0, bounds.lower) if bounds.lower.is_finite else fallback
        numbers[symbol] = number if number is not None else min(within, bounds.upper)
    return int(node.expr.xreplace(numbers))


def selective_contexts(policy: Any, *, allow_cache_entry_mutation: bool, traced: bool) -> Any:
    """Return PyTorch's two context managers of a selectively checkpointed region.

    Before PyTorch 2.13, recomputation calls the policy again. Eager code therefore gets context managers that behave as
    in 2.13.

    Args:
        policy: the policy of the region.
        allow_cache_entry_mutation: whether saved tensors may be written to in place.
        traced: whether a compiler traces the region.
    """
    from torch.utils import checkpoint

    if traced or not torch_compat.is_before("2.13"):
        make: Any = checkpoint.create_selective_checkpoint_contexts
        return make(policy, allow_cache_entry_mutation=allow_cache_entry_mutation)
    mode, saved = _region_mode(), defaultdict[Any, dict[int, Any]](dict)
    return mode(policy, saved, True), mode(None, saved, allow_cache_entry_mutation)


@functools.cache
def _region_mode() -> type[Any]:
    """Return a class of dispatch modes for forward and for recomputation of a checkpointed region."""
    from torch.utils import checkpoint

    from remat.torch_compat import TorchDispatchMode, pytree

    theirs: Any = checkpoint
    recomputed, used = object(), object()  # cache entries of results that are not saved

    class RegionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Save or recompute each operator's result in a checkpointed region, as PyTorch 2.13 does."""

        def __init__(self, policy: Any, storage: Any, written: bool) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.policy, self.storage, self.written = policy, storage, written
            self.calls: dict[Any, int] = defaultdict(int)

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __enter__(self) -> Any:
            self.calls.clear()
            return super().__enter__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if op in theirs.SAC_IGNORED_OPS:
                return op(*args, **kwargs)
            entries, call = self.storage[op], self.calls[op]
            self.calls[op] += 1
            if self.policy is None:
                return self.again(entries, call, op, args, kwargs)
            out = op(*args, **kwargs)
            ctx = theirs.SelectiveCheckpointContext(is_recompute=False)
            ctx.op_output = out
            saves = theirs.CheckpointPolicy.MUST_SAVE, theirs.CheckpointPolicy.PREFER_SAVE
            entries[call] = recomputed
            if self.policy(ctx, op, *args, **kwargs) in saves:
                entries[call] = pytree.tree_map(
                    lambda x: theirs._VersionWrapper(theirs._maybe_detach(x, True)), out
                )
            return out

        def again(self, entries: Any, call: int, op: Any, args: Any, kwargs: Any) -> Any:
            """Return an operator's result that forward saved; if forward did not save it, run the operator again."""
            if call not in entries:
                raise RuntimeError(f"{op} encountered during backward, but not found in storage")
            entry = entries[call]
            if entry is used:
                raise RuntimeError(
                    "Trying to backward an extra time. You are only allowed to backward once "
                    "on any region computed under selective activation checkpoint."
                )
            if entry is recomputed:
                return op(*args, **kwargs)
            entries[call] = used
            return pytree.tree_map(lambda x: x.get_val(self.written), entry)

    return RegionMode


def flop_formula(packet: Any) -> Callable[..., Any] | None:
    """Return PyTorch's formula for the floating-point operations of an operator; None if there is none.

    PyTorch 2.13 added formulas for flex attention; this function has the same formulas for older versions.
    """
    from torch.utils import flop_counter

    theirs: Any = flop_counter
    formula: Any = theirs.flop_registry.get(packet)
    if formula is None and str(packet) == "flex_attention":
        return lambda q, k, v, *_, **__: theirs.sdpa_flop_count(q.shape, k.shape, v.shape)
    if formula is None and str(packet) == "flex_attention_backward":
        return lambda q, k, v, out, *_, **__: theirs.sdpa_backward_flop_count(
            out.shape, q.shape, k.shape, v.shape
        )
    return formula  # type: ignore[no-any-return]
