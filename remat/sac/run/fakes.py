"""Run a model on fake copies of its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.capture.fakes_of_models import Faker


@contextlib.contextmanager
def fake_parameters(model: nn.Module, faker: Faker) -> Iterator[None]:
    """Replace a model's parameters and buffers by fake tensors within the ``with`` block.

    The model itself is changed, because some models cannot be copied. Tied parameters stay tied.
    After the block, the real tensors are put back.
    """
    put = [
        (slots, name, tensor)
        for module in model.modules()
        for slots in (torch_compat.parameters_of(module), torch_compat.buffers_of(module))
        for name, tensor in slots.items()
        if tensor is not None
    ]
    try:
        for slots, name, tensor in put:
            slots[name] = faker(tensor)
        yield
    finally:
        for slots, name, tensor in put:
            slots[name] = tensor


def check_fake(name: str, module: nn.Module) -> None:
    """Raise a ProblemError if a module has real tensors and the active fake mode does not accept them.

    Args:
        name: name of the module for the message.
        module: the module.
    """
    mode = torch_compat.active_fake_mode()
    if mode is None or mode.allow_non_fake_inputs:
        return
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not torch_compat.is_fake(tensor):
            raise ProblemError(
                f"module '{name}': '{path}' is a real tensor, not a fake one; make the model inside "
                "of the FakeTensorMode, or use FakeTensorMode(allow_non_fake_inputs=True)"
            )
