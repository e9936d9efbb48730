"""Meta's package ``torch_remat``: its regions become recompute tags, which plans obey."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat

torch_remat = pytest.importorskip("torch_remat")


class Block(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch_remat.region(self.inner, "inner", recompute=self.recompute)(x)
        if not self.recompute:
            torch_remat.recompute_needs_tensor(h)
        return x + self.outer(h.sin().exp())


class Model(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = torch_remat.checkpoint(region_name=f"blocks.{i}")(block)(x)
        return x.square().sum()


@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize(("recompute", "saved"), [(True, 0), (False, 2)])
def test_plans_obey_the_regions(budget: int, recompute: bool, saved: int) -> None:
    model, x = Model(recompute), torch.randn(32, 16)
    model(x).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    options = {"budget": budget, "lower": "eager"}
    torch.compile(model, backend="remat", fullgraph=True, options=options)(x).backward()
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, wanted)
    of_blocks = [
        name for name in remat.plans()[-1].saved if name.startswith(("addmm", "sin", "exp"))
    ]
    assert len(of_blocks) == saved, "only results of regions with recompute=False are saved"
    assert all(name.startswith("addmm") for name in of_blocks)
