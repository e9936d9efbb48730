"""A folder with a file of models in it, which the command imports and the tests forget again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: A file's beginning: a block whose activations are worth a decision.
BLOCK = '''
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 48), torch.nn.Linear(48, 16)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(torch.tanh(h) * torch.sigmoid(h))
'''  # fmt: skip


def folder_with(name: str, source: str) -> Any:
    """A fixture for all tests of a file: a folder with one module in it, to work in."""

    @pytest.fixture(autouse=True)
    def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A folder with a model in it, and an interpreter that forgets it."""
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        yield tmp_path
        sys.modules.pop(name, None)

    return folder
