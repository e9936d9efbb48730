"""Small models with custom operators: ones that do more than they say, and one that is declared pure.

An operator that nobody has declared must run exactly once a step, wherever it stands. Eager PyTorch runs
checkpointed regions again, and with them what counts its calls; so only the others stand in regions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat

_CALLS = 0


def begin() -> None:
    """Operators count from here."""
    global _CALLS
    _CALLS = 0


@torch.library.custom_op("remat_benchmarks::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers, and has no tag that says so."""
    return x + 0.5 * torch.randn_like(x)


@torch.library.custom_op("remat_benchmarks::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    """Scales by the number of its call."""
    global _CALLS
    _CALLS += 1
    return x * (1 + _CALLS % 5)


@torch.library.custom_op("remat_benchmarks::mutating", mutates_args=("total",))
def mutating(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Draws random numbers, and adds to what it is given."""
    total.add_(torch.rand(total.shape))
    return x * torch.rand_like(x)


@torch.library.custom_op("remat_benchmarks::softened", mutates_args=())
def softened(x: torch.Tensor) -> torch.Tensor:
    """A function of its input, and declared to be one."""
    return x.tanh() * 1.5


remat.declare_pure(softened)

for _operator in (noisy, counting, softened):
    _operator.register_fake(torch.empty_like)
mutating.register_fake(lambda x, total: torch.empty_like(x))
noisy.register_autograd(lambda ctx, g: g * 1.0)
counting.register_autograd(lambda ctx, g: g * 1.0)
softened.register_autograd(
    lambda ctx, g: g * (1.5 - ctx.saved_tensors[0] ** 2 / 1.5),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


OPERATORS: dict[str, Callable[..., Any]] = {
    "random": noisy,
    "counting": counting,
    "mutating": mutating,
    "pure": softened,
}


class Blocks(nn.Module):
    """Blocks around one operator, with dropout on both sides, so that the order of draws shows."""

    total: torch.Tensor

    def __init__(self, op: str, *, regions: bool, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.op = op
        self.regions = regions

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.tanh(layer(x)), 0.2)
        op = OPERATORS[self.op]
        h = h * op(h.detach(), self.total) + self.total if op is mutating else op(h)
        return nn.functional.dropout(torch.sin(h), 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if self.regions and i % 2 == 0:
                x = x + checkpoint(self.block, layer, x, use_reentrant=False)
            else:
                x = x + self.block(layer, x)
        return x
