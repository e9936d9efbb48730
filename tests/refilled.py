"""Steps whose inputs are overwritten between forward and backward, as a loader does with its buffer.

Eager PyTorch trains with them: autograd saves what is computed of the inputs, not the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.models import Step


@dataclass(frozen=True, kw_only=True, eq=False)
class RefilledStep(Step):
    """One training step on copies of its arguments, which are zeroed before backward."""

    def __call__(self, compiled: Callable[..., Any] | None = None) -> tuple[Any, torch.Tensor]:
        """Runs forward and returns its output and the loss; the arguments are gone then."""
        args = [a.clone() for a in self.args]
        out = (self.model if compiled is None else compiled)(*args)
        loss = self.loss(out)
        for a in args:
            a.zero_()
        return out, loss


class Pixels(nn.Module):
    """A convolution over normalised bytes: the smallest way to compute it again is a copy of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Dropout()
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers((image.float() / 255 - 0.5).clamp(-0.4, 0.4))
        return out


class Masked(nn.Module):
    """Tokens, their mask and soft targets, each read through a function."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.table(ids % 32)).tanh() * mask.float()[:, None]
        h = (h @ self.table.weight.t()).sin() @ self.table.weight
        return nn.functional.cross_entropy(self.out(h), (target * 2).softmax(-1))


#: The steps by name; each starts from the same numbers.
CASES: Mapping[str, Callable[[], Step]] = {
    "refilled pixels": lambda: RefilledStep(
        model=Pixels(),
        args=(torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8),),
        loss=lambda out: out.sin().mean(),
    ),
    "refilled tokens": lambda: RefilledStep(
        model=Masked(),
        args=(torch.randint(0, 99, (24,)), torch.rand(24) > 0.3, torch.randn(24, 32)),
        loss=lambda out: out,
    ),
}
