"""Substitutes for parts of newer PyTorch versions that older versions lack.

`remat.torch_compat` names the versions that need each substitute, and uses them where a name is missing.
Private names of PyTorch that only older versions have are used in this file only.
"""

from __future__ import annotations

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

    Before PyTorch 2.13, recomputation of eager code calls the policy again, and PyTorch 2.11 calls the policy before the
    operator. Here the policy gets the operator's result, and recomputation repeats the verdicts of forward.

    Args:
        policy: the policy of the region.
        allow_cache_entry_mutation: whether saved tensors may be written to in place.
        traced: whether a compiler traces the region.
    """
    from torch.utils import checkpoint

    theirs: Any = checkpoint
    make = theirs.create_selective_checkpoint_contexts
    if traced or not torch_compat.is_before("2.13"):
        return make(policy, allow_cache_entry_mutation=allow_cache_entry_mutation)
    verdicts: list[Any] = []
    remaining: list[Any] = []  # verdicts for the rest of a recomputation, the next one last

    def repeated(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return remaining.pop() if remaining else theirs.CheckpointPolicy.PREFER_RECOMPUTE

    class Forward(theirs._CachingTorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            out = op(*args, **kwargs)
            if op in theirs.SAC_IGNORED_OPS:
                return out
            ctx = theirs.SelectiveCheckpointContext(is_recompute=False)
            ctx.op_output = out
            verdicts.append(policy(ctx, op, *args, **kwargs))
            if verdicts[-1].name in ("MUST_SAVE", "PREFER_SAVE"):
                saved = torch_compat.pytree.tree_map(
                    lambda x: theirs._VersionWrapper(theirs._maybe_detach(x, True)), out
                )
                self.storage[op].append(saved)
            return out

    class Recompute(theirs._CachedTorchDispatchMode):  # type: ignore[misc]
        def __enter__(self) -> Any:
            remaining[:] = reversed(verdicts)
            return super().__enter__()

    storage = defaultdict[Any, list[Any]](list)
    forward = Forward(policy, storage)
    return forward, Recompute(repeated, storage, allow_cache_entry_mutation)


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
