"""Custom operators that call saved-tensor hooks which cannot be traced.

``remat::pack_eagerly`` calls pack, stores the result in this process, and returns a ticket. The ticket
is a tensor with one number, which forward hands to backward. ``remat::unpack_eagerly`` calls unpack
with the stored result. The stored result of pack is dropped when the ticket's memory is freed, just as
autograd frees a saved tensor.
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

#: Dict from the number in a ticket to the packed value, which is kept until backward unpacks it.
PACKED: dict[int, Any] = {}
_NUMBERS = itertools.count(1)


#: End of the error message for hooks that use, at run time, a fake tensor from the time of tracing.
_TRACED = (
    "hooks are traced first, on tensors without numbers, and this is one that was kept then: let pack return "
    "what unpack needs, and make what the hooks keep before the step is compiled"
)


def _called(hooks: SavedTensorHooks, which: str, given: Any) -> Any:
    """Call a pack or unpack hook, and return its result; raise a PlanError if the hook fails."""
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


# A CUDA graph would replay the kernels without calling the hooks, hence `cudagraph_unsafe`.
@torch.library.custom_op("remat::pack_eagerly", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def pack_eagerly(x: torch.Tensor, key: str) -> torch.Tensor:
    """Pack a tensor and return a ticket, by which `unpack_eagerly` finds the packed value."""
    # A copy, because the compiled step reuses the memory of x, but pack may keep that memory, for example
    # as a NumPy array.
    packed = _called(find(key), "pack", x.clone())
    number = next(_NUMBERS)
    ticket = torch.tensor(number, dtype=torch.int64)
    PACKED[number] = packed
    # Bound to the storage, because detached copies of the ticket share only the storage.
    weakref.finalize(ticket.untyped_storage(), PACKED.pop, number, None).atexit = False
    return ticket


pack_eagerly.register_fake(lambda x, key: torch.empty((), dtype=torch.int64))


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
    """Unpack the value that a ticket identifies; return a tensor with the size and strides of the saved tensor.

    Raises:
        PlanError: the packed value is gone, unpack raised, or unpack returned no tensor of this
            size, dtype and device.
    """
    hooks = find(key)
    number = int(ticket)
    if number not in PACKED:
        raise PlanError(
            f"hooks '{hooks.name}': what was packed is gone; did backward run twice over a step that "
            "was compiled for one? (torch._functorch.config.donated_buffer = False allows it)"
        )
    value = _called(hooks, "unpack", PACKED[number])
    value = check_unpacked(hooks.name, value, size, dtype, device)
    # A copy, because unpack may return the stored value itself, and a second backward may unpack it again.
    laid_out = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return laid_out.copy_(value)


unpack_eagerly.register_fake(
    lambda ticket, key, size, stride, dtype, device: torch.empty_strided(
        size, stride, dtype=dtype, device=device
    )
)
