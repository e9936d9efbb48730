"""A folder with a file of models in it, `nets.py`, which the command imports and the tests forget again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: The file's beginning: blocks whose activations are worth a decision, without weights. A test file adds its `MODELS`.
BLOCKS = '''
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 48), torch.nn.Linear(48, 16)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(torch.tanh(h) * torch.sigmoid(h))

def blocks(depth=2):
    with torch.device("meta"):
        return torch.nn.Sequential(*(Block() for _ in range(depth))), (torch.zeros(512, 16),)

def block():
    return blocks(depth=1)
'''  # fmt: skip


@pytest.fixture(autouse=True)
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The working directory of a test, with models in it."""
    (tmp_path / "nets.py").write_text(BLOCKS + getattr(request.module, "MODELS", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
