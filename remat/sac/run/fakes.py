"""Runs that leave a model as it was: fake tensors in its place, or buffers put back after a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def buffers_as_before(model: nn.Module, fake: bool) -> Iterator[None]:
    """A real forward leaves buffers and random generators as they were."""
    if fake:
        yield
        return
    values = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def fake_of(tensor: torch.Tensor, faker: FakeTensorMode) -> torch.Tensor:
    """A fake of a tensor; of one on the meta device, as if it lay on the CPU.

    Operators choose by device what they run: attention on the meta device is not what runs.
    """
    if not tensor.is_meta or tensor.layout is not torch.strided:
        made: torch.Tensor = faker.from_tensor(tensor)
        return made
    with faker:
        return torch.empty_strided(
            tensor.size(),
            tensor.stride(),
            dtype=tensor.dtype,
            device="cpu",
            requires_grad=tensor.requires_grad and tensor.is_leaf,
        )


@contextlib.contextmanager
def fake_parameters(model: nn.Module, faker: FakeTensorMode) -> Iterator[None]:
    """Puts fake tensors in the place of parameters and buffers; tied ones stay tied."""
    put: list[tuple[dict[str, Any], str, Any]] = []
    known: dict[int, Any] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    fake = fake_of(tensor, faker)
                    if isinstance(tensor, nn.Parameter) and not isinstance(fake, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    known[id(tensor)] = fake
                put.append((slots, name, tensor))
                slots[name] = known[id(tensor)]
    try:
        yield
    finally:
        for slots, name, tensor in put:
            slots[name] = tensor
