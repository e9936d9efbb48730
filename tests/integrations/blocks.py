"""Models of several compiled graphs, and how their steps are measured."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat.errors import BudgetWarning
from remat.running.measure import measure_step


class Block(nn.Module):
    def __init__(self, wide: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, wide), nn.Linear(wide, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))).sin())


class Blocks(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Broken(Blocks):
    """Three graphs, no two of which are equal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.blocks[2](x)


def by_block(model: Blocks, options: dict[str, Any]) -> Callable[..., Any]:
    """Regional compilation, with options of its own for each block."""
    for block in model.blocks:
        block.compile(backend="remat", options=dict(options))
    return model


def whole(model: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    return torch.compile(model, backend="remat", options=options)  # type: ignore[no-any-return]


def measured(
    model: nn.Module, compiled: Callable[..., Any], x: torch.Tensor
) -> tuple[int, list[int]]:
    """The peak of a step in the allocator, and the figures that warnings gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure_step(compiled, (x,), by="allocator", resident=model.parameters())
    said = [str(w.message) for w in caught if issubclass(w.category, BudgetWarning)]
    figures = [re.search(r"a step takes [^(]*\((\d+) bytes\)", text) for text in said]
    return found.peak_bytes, [int(f[1]) for f in figures if f]


def step(f: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """One step, whose output is held during backward, as when it is measured."""
    out: torch.Tensor = f(x)
    out.sum().backward()
    return out


def made(how: str) -> nn.Module:
    torch.manual_seed(0)
    if how == "breaks":
        return Broken([Block(256), Block(320), Block(384)])
    return Blocks([Block()] * 3 if how == "tied" else [Block() for _ in range(4)])
