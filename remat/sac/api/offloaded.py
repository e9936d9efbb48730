"""A module whose saved tensors wait for backward in the host's memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from remat.errors import PlanError
from remat.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPIED
from remat.sac.run.module_calls import own_forward
from remat.sac.run.operators import tensors_in
from remat.torch_compat import version

#: Whose memory a tensor is in, and how often that has been written to.
_Storage = weakref.ref[torch.UntypedStorage]
_Contents = tuple[_Storage, int]


class Replaced:
    """What stands in the place of a module's ``forward`` where a plan has been applied.

    An object and not a closure, so that a copy of the model runs the copy's forward, and a pickled
    model can be read again. In eval mode, and where no gradients are wanted, the module runs as it did.

    Attributes:
        before: what stood there; None where it is the method of the class.
    """

    def __init__(self, module: nn.Module) -> None:
        self.before = own_forward(module)
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        return self._planned(*args, **kwargs)

    def _planned(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


class Offloaded(Replaced):
    """Sends what a module saves for backward to the host; its inputs and parameters stay."""

    def _planned(self, *args: Any, **kwargs: Any) -> Any:
        stay = [*self._module.parameters(), *self._module.buffers(), *tensors_in((args, kwargs))]
        call = _Call(stay)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            return self._forward(*args, **kwargs)


class _Call:
    """What one call of a module has sent. Tensors that share memory are sent once, as they were when saved.

    Args:
        stay: tensors whose memory stays where it is.
    """

    def __init__(self, stay: Sequence[torch.Tensor]) -> None:
        plain = [t for t in stay if _is_plain(t)]
        self._stay = {weakref.ref(t.untyped_storage()) for t in plain}
        self._cuda = any(t.is_cuda for t in plain)
        self._sent: dict[_Contents, torch.Tensor] = {}
        self._back: dict[_Contents, _Storage] = {}

    def pack(self, saved: torch.Tensor) -> Any:
        # Autograd looks at no versions where there are hooks.
        stays = saved.detach(), version(saved)
        if not _is_plain(saved) or (self._cuda and not saved.is_cuda):
            return stays
        storage = saved.untyped_storage()
        contents = weakref.ref(storage), version(saved)
        if contents[0] in self._stay or not storage.nbytes():
            return stays
        if contents not in self._sent:
            flat = torch.empty(0, dtype=torch.uint8, device=saved.device).set_(storage)
            self._sent[contents] = WAIT_COPIED(OFFLOAD(flat), flat)
        like = saved.dtype, saved.size(), saved.stride(), saved.storage_offset(), saved.device
        return self._sent[contents], contents, like

    def unpack(self, packed: Any) -> torch.Tensor:
        if len(packed) == 2:
            return _unchanged(*packed)
        host, contents, (dtype, size, stride, offset, device) = packed
        known = self._back.get(contents)
        storage = None if known is None else known()
        if storage is None:
            storage = WAIT_COPIED(RELOAD(host, device), host).untyped_storage()
            self._back[contents] = weakref.ref(storage)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


def _unchanged(saved: torch.Tensor, then: int) -> torch.Tensor:
    if version(saved) != then:
        raise PlanError(
            f"an input or parameter of shape {list(saved.shape)} that an offloaded module saved for backward was "
            "written to in place since: write to a copy of it"
        )
    return saved


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is one with memory of its own kind: no subclass, not sparse, not quantised, not fake."""
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
    )
