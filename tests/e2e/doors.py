"""A small model, and a backend around a partition function, for tests of the doors into torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import remat

#: The plans made since a test started.
NewPlans = Callable[[], tuple[remat.Plan, ...]]


class Mlp(nn.Module):
    """Products, dropout and a pointwise tail, wide enough that budgets below 1 decide something."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)) * torch.sigmoid(x))
        return x


def aot(partition: Any) -> Any:
    """A backend that runs the halves as a partition function has split them."""
    return aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module.forward), partition_fn=partition
    )
