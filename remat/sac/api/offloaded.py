"""A module whose saved tensors wait for backward in the host's memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.errors import PlanError
from remat.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPIED
from remat.sac.api.replaced import Replaced
from remat.sac.run.operators import tensors_in
from remat.torch_compat import version


class Offloaded(Replaced):
    """Sends what a module saves for backward to the host; its inputs, parameters and attributes stay."""

    def _planned(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        own = [v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
        call = _Call([*module.parameters(), *module.buffers(), *own, *tensors_in((args, kwargs))])
        with torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack):
            return self._forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor in the host's memory.

    Attributes:
        host: the copy, of one slice along each dimension that was repeated.
        size: its shape.
        device: where it was.
    """

    host: torch.Tensor
    size: torch.Size
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Stays:
    """A tensor that stays where it is, and its version when it was saved: autograd looks at none where there are hooks."""

    tensor: torch.Tensor
    version: int


class _Call:
    """One call of a module.

    Every save is sent by itself: tensors may share memory and be written to in ways that no version tells.

    Args:
        stay: tensors whose memory stays where it is.
    """

    def __init__(self, stay: Sequence[torch.Tensor]) -> None:
        self._stay = {m for m in map(_memory, stay) if m is not None}
        self._cuda = any(t.is_cuda for t in stay)

    def pack(self, saved: torch.Tensor) -> _Sent | _Stays:
        memory = _memory(saved)
        on_host = self._cuda and not saved.is_cuda
        if memory is None or memory in self._stay or on_host or not saved.numel():
            return _Stays(saved.detach(), version(saved))
        once = saved.detach().resolve_conj().resolve_neg()
        for dim, stride in enumerate(once.stride()):
            once = once.narrow(dim, 0, 1) if stride == 0 else once
        return _Sent(WAIT_COPIED(OFFLOAD(once), once), saved.size(), saved.device)


def _unpack(kept: _Sent | _Stays) -> torch.Tensor:
    if isinstance(kept, _Sent):
        back: torch.Tensor = WAIT_COPIED(RELOAD(kept.host, kept.device), kept.host)
        return back.expand(kept.size)
    if version(kept.tensor) != kept.version:
        raise PlanError(
            f"an input or parameter of shape {list(kept.tensor.shape)} that an offloaded module saved for backward "
            "was written to in place since: write to a copy of it"
        )
    return kept.tensor


def _memory(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage] | None:
    """The memory of a tensor; None where it has none of its own, as subclasses, sparse ones and those of transforms."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_nested:
        return None
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return weakref.ref(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # under torch.func's transforms
        return None
