"""A stack of residual blocks, whose step pictures, pages and exports show."""

from __future__ import annotations

import torch
from torch import nn

import remat
from tests.graphs import joint_of


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(drop) if drop else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        h = nn.functional.gelu(h)
        return x + self.drop(self.down(h))


def stacked(batch: int = 32, drop: float = 0.0) -> remat.JointGraph:
    torch.manual_seed(0)
    return joint_of(nn.Sequential(*(Block(drop) for _ in range(3))), torch.randn(batch, 16))
