"""Saved-tensor hooks that cannot be traced, run as they are behind two operators.

``remat::pack_eagerly`` calls pack and returns a ticket, a tensor of one number, which is what
forward hands to backward; ``remat::unpack_eagerly`` calls unpack with what the ticket stands for.
What pack returned lives as long as the memory of its ticket, which autograd frees as it would have
freed the saved tensor.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from remat import torch_compat
from remat.errors import PlanError
from remat.passes.packing.pairs import SavedTensorHooks, check_unpacked, find, naming
from remat.torch_compat import pytree

_PACKED: dict[int, Any] = {}
_NUMBERS = itertools.count(1)


#: What to do about hooks that use what they were given, or made, when they were traced.
_TRACED = (
    "hooks are traced first, on tensors without numbers, and this is one that was kept then: let pack return "
    "what unpack needs, and make what the hooks keep before the step is compiled"
)


def packed_count() -> int:
    """How many packed values wait for backward."""
    return len(_PACKED)


def _called(hooks: SavedTensorHooks, which: str, given: Any) -> Any:
    """What a hook returns.

    Raises:
        PlanError: it raised, or it works on a tensor that it kept from when it was traced.
    """
    named = f"hooks '{hooks.name}': {which}"
    try:
        with naming(named, PlanError):
            returned = getattr(hooks, which)(given)
    except PlanError as error:
        if "FakeTensor" in str(error):
            raise PlanError(f"{error}; {_TRACED}") from error.__cause__
        raise
    if any(isinstance(v, torch_compat.FakeTensor) for v in pytree.tree_leaves(returned)):
        raise PlanError(f"{named} returned a FakeTensor; {_TRACED}")
    return returned


@torch.library.custom_op("remat::pack_eagerly", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def pack_eagerly(x: torch.Tensor, key: str) -> torch.Tensor:
    """Packs a tensor and returns the ticket for it."""
    # A copy, since the compiled step uses the memory of x again and pack may keep it, even out of
    # sight: as a NumPy array, say.
    packed = _called(find(key), "pack", x.clone())
    number = next(_NUMBERS)
    ticket = torch.tensor(number, dtype=torch.int64)
    _PACKED[number] = packed
    weakref.finalize(ticket.untyped_storage(), _PACKED.pop, number, None).atexit = False
    return ticket


@pack_eagerly.register_fake
def _(x: torch.Tensor, key: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "remat::unpack_eagerly", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def unpack_eagerly(
    ticket: torch.Tensor,
    key: str,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Unpacks what a ticket stands for, as a tensor laid out as it was saved."""
    hooks = find(key)
    number = int(ticket)
    if number not in _PACKED:
        raise PlanError(
            f"hooks '{hooks.name}': what was packed is gone; did backward run twice over a step that "
            "was compiled for one? (torch._functorch.config.donated_buffer = False allows it)"
        )
    value = _called(hooks, "unpack", _PACKED[number])
    value = check_unpacked(hooks.name, value, size, dtype, device)
    # A copy for the same reason: the result may be what was kept, which may be unpacked again.
    laid_out = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return laid_out.copy_(value)


@unpack_eagerly.register_fake
def _(
    ticket: torch.Tensor,
    key: str,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
