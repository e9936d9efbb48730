"""Copies of tensors in the host's memory and back, beside the computation.

Forward calls `offload` and, once memory is to be free, `wait_copied`; backward calls `reload` and, where the
tensor is first read, `wait_copied`. Each direction has a stream of its own. Memory of the host is page-locked
and comes from PyTorch's caching allocator for it, which hands the same buffers out again step after step.
The queues are those of ``torch/_functorch/_activation_offloading/offload_ops.py`` in PyTorch; what differs is
that nothing is resized to 0 bytes, so that backward may run twice, and that there is one stream each way.

On a CPU copies are plain, and lie where PyTorch's allocator does not count them: what it counts is the memory
that a device would need.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from remat.graph.storages import Sizes

#: The stream of each device and direction, and what a copy that is under way ends with, by its address.
_STREAMS: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
_ENDS: dict[int, torch.cuda.Event] = {}


@torch.library.custom_op("remat::offload", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def offload(x: torch.Tensor) -> torch.Tensor:
    """Begins a copy in the host's memory; `wait_copied` ends it."""
    if x.device.type != "cuda":
        return _uncounted(x).copy_(x)
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    return _begun(host, x, x.device, back=False)


@offload.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.custom_op("remat::reload", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begins a copy on a device; `wait_copied` ends it."""
    if device.type != "cuda":
        return torch.empty_like(host, device=device).copy_(host)
    return _begun(torch.empty_like(host, device=device), host, device, back=True)


@reload.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(host, device=device)


torch.library.define(
    "remat::wait_copied",
    "(Tensor(a) copy, Tensor of) -> Tensor(a)",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def _wait_copied(copy: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The copy, once it is made; what it is made of stays until then."""
    end = _ENDS.pop(copy.data_ptr(), None)
    if end is not None:
        device = of.device if of.device.type == "cuda" else copy.device
        torch.cuda.current_stream(device).wait_event(end)
    return copy


torch.library.impl("remat::wait_copied", "CompositeExplicitAutograd", _wait_copied)
torch.library.register_fake("remat::wait_copied", lambda copy, of: copy)
OFFLOAD = torch.ops.remat.offload.default
RELOAD = torch.ops.remat.reload.default
WAIT_COPIED = torch.ops.remat.wait_copied.default


def _uncounted(like: torch.Tensor) -> torch.Tensor:
    """A tensor like another, in memory of Python's."""
    laid_out = torch.empty_like(like, device="meta")
    nbytes = laid_out.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty_like(like)
    flat = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(laid_out.size(), laid_out.stride())


def _begun(
    copy: torch.Tensor, of: torch.Tensor, device: torch.device, *, back: bool
) -> torch.Tensor:
    """Begins a copy on the stream of a direction, behind what the computation has begun before."""
    stream = _STREAMS.get((device, back))
    if stream is None:
        stream = _STREAMS[device, back] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(of, non_blocking=True)
        _ENDS[copy.data_ptr()] = stream.record_event()
    return copy


def host_storages(nodes: Iterable[fx.Node], sizes: Sizes) -> set[int]:
    """The storages of copies in the host's memory, which take none of the device's."""
    return {key for node in nodes if node.target is OFFLOAD for key in sizes.keys(node)}
