"""Runs that leave a model as it was: with fakes of its tensors, or all put back after a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from remat import torch_compat
from remat.errors import ProblemError
from remat.running.measure import as_before


@contextlib.contextmanager
def left_as_found(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A run that leaves values, gradients and random generators as they were.

    Fake tensors have no values to put back, and nothing is drawn for them; their gradients go.
    """
    if torch_compat.active_fake_mode() is None:
        device = next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))
        with as_before(tensors, device):
            yield
        return
    before = [(t, t.grad) for t in tensors if t.requires_grad and t.is_leaf]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def fake_of(tensor: torch.Tensor, faker: torch_compat.FakeTensorMode) -> torch.Tensor:
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
def fake_parameters(model: nn.Module, faker: torch_compat.FakeTensorMode) -> Iterator[None]:
    """Puts fake tensors in the place of parameters and buffers; tied ones stay tied."""
    put: list[tuple[dict[str, Any], str, Any]] = []
    known: dict[int, Any] = {}
    for module in model.modules():
        for slots in (torch_compat.parameters_of(module), torch_compat.buffers_of(module)):
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


def check_fake(name: str, module: nn.Module) -> None:
    """Refuses real parameters: they were made outside of the fake mode."""
    mode = torch_compat.active_fake_mode()
    if mode is None or mode.allow_non_fake_inputs:
        return
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not torch_compat.is_fake(tensor):
            raise ProblemError(
                f"module '{name}': '{path}' is a real tensor, not a fake one; make the model inside "
                "of the FakeTensorMode, or use FakeTensorMode(allow_non_fake_inputs=True)"
            )
