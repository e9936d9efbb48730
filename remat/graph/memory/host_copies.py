"""Copy tensors asynchronously to the host's memory and back.

Forward calls `offload`, and later `wait_copied`, after which the device memory can be freed. Backward calls `reload`,
and `wait_copied` before the first read of the tensor. The host's memory is page-locked and comes from PyTorch's
caching host allocator, which reuses the same buffers in every step. The CUDA streams for copies follow
``torch/_functorch/_activation_offloading/offload_ops.py``, with two differences. No storage is resized to 0 bytes, so
that backward may run twice. Each direction of copies uses a single stream.

On a CPU, copies are synchronous and use memory that PyTorch's allocator does not count. The allocator's count on a
CPU therefore equals the memory that a device would need.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from remat.graph.memory.storages import Sizes, tensors_of

#: Copy stream of each device and direction (True for host to device).
_STREAMS: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
#: Event that marks the end of each copy in progress, by the address of the copy's memory.
_ENDS: dict[int, torch.cuda.Event] = {}


def host_bytes_of(nbytes: int, *, pinned: bool) -> int:
    """Return the bytes that a copy of ``nbytes`` bytes takes in the host's memory."""
    # PyTorch's allocator of page-locked memory rounds each buffer up to a power of two
    # (ATen/core/CachingHostAllocator.h). From PyTorch 2.13 on, the setting `pinned_max_round_threshold_mb` exempts
    # large buffers; remat counts them as rounded, too.
    return 1 << (nbytes - 1).bit_length() if pinned and nbytes else nbytes


def is_pinned(value: object) -> bool:
    """Return whether the copy of a value to the host is in page-locked memory."""
    return any(tensor.device.type == "cuda" for tensor in tensors_of(value))


@torch.library.custom_op("remat::offload", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def offload(x: torch.Tensor) -> torch.Tensor:
    """Start copying a device tensor to the host's memory; return the copy, which is complete after `wait_copied`."""
    if x.device.type != "cuda":
        return _uncounted(x).copy_(x)
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    return _start_copy(host, x, x.device, back=False)


@offload.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.custom_op("remat::reload", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start copying a host tensor to a device, and return the copy, which is complete after `wait_copied`."""
    if device.type != "cuda":
        return torch.empty_like(host, device=device).copy_(host)
    return _start_copy(torch.empty_like(host, device=device), host, device, back=True)


@reload.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(host, device=device)


# `custom_op` does not allow a result that aliases an input, so this operator is defined by its
# schema.
torch.library.define(
    "remat::wait_copied",
    "(Tensor(a) copy, Tensor of) -> Tensor(a)",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def _wait_copied(copy: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Make the current stream wait for a copy between host and device, and return the copy."""
    end = _ENDS.pop(copy.data_ptr(), None)
    if end is not None:
        device = of.device if of.device.type == "cuda" else copy.device
        # The graph passes `of` along, so that the source stays alive until here.
        torch.cuda.current_stream(device).wait_event(end)
    return copy


torch.library.impl("remat::wait_copied", "CompositeExplicitAutograd", _wait_copied)
torch.library.register_fake("remat::wait_copied", lambda copy, of: copy)
OFFLOAD = torch.ops.remat.offload.default
RELOAD = torch.ops.remat.reload.default
WAIT_COPIED = torch.ops.remat.wait_copied.default


def _uncounted(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the layout and dtype of ``like``, in memory that PyTorch's allocator does not count."""
    laid_out = torch.empty_like(like, device="meta")
    nbytes = laid_out.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty_like(like)
    # The memory belongs to a Python object, so PyTorch's allocator does not count it.
    flat = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(laid_out.size(), laid_out.stride())


def _start_copy(
    copy: torch.Tensor, of: torch.Tensor, device: torch.device, *, back: bool
) -> torch.Tensor:
    """Start a copy between host and device on the CUDA stream for the copy's direction."""
    stream = _STREAMS.get((device, back))
    if stream is None:
        stream = _STREAMS[device, back] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The copy may start only after the computation has written its source.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(of, non_blocking=True)
        # An operator can only return tensors, so `wait_copied` finds the event by the address of
        # the copy.
        _ENDS[copy.data_ptr()] = stream.record_event()
    return copy


def host_storages(nodes: Iterable[fx.Node], sizes: Sizes) -> set[int]:
    """Return the keys of the storages that hold copies by ``remat::offload`` in the host's memory."""
    return {key for node in nodes if node.target is OFFLOAD for key in sizes.keys(node)}
