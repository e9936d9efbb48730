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

from tests.fuzz.functions import bent, counter, noisy


# Unlike `tests.fuzz.functions.stir` it counts no calls, so that graphs with it can be run again and compared.
@torch.library.custom_op("remat_benchmarks::mutating", mutates_args=("total",))
def mutating(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Draws random numbers, and adds to what it is given."""
    total.add_(torch.rand(total.shape))
    return x * torch.rand_like(x)


mutating.register_fake(lambda x, total: torch.empty_like(x))

OPERATORS: dict[str, Callable[..., Any]] = {
    "random": noisy,
    "counting": counter,
    "mutating": mutating,
    "pure": bent,
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
