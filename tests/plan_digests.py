"""Plans of a few small models by every solver of ours, as digests on standard output.

Run as a process of its own under different hash seeds by ``test_distributed.py``.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import nn

import remat
from remat.plugins.registry import registry
from tests.rank_worker import Mlp


class Attention(nn.Module):
    """Views, a softmax, dropout and a residual."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.project(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.dropout(torch.softmax(q @ k.mT / (w // self.heads) ** 0.5, -1))
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))


def digests() -> dict[str, str]:
    """Digest of the plan of every model by every solver that promises to be deterministic."""
    steps = {
        "mlp": (Mlp(), torch.randn(64, 16)),
        "attention": (nn.Sequential(Attention(), Attention()), torch.randn(4, 24, 32)),
    }
    found: dict[str, str] = {}
    for model_name, (model, x) in steps.items():
        joint = remat.capture(model, (x,), lower="eager")
        found[f"{model_name} graph"] = joint.fingerprint
        for name in remat.solver_names():
            solver = registry().solver(name)
            if not (solver.deterministic and type(solver).__module__.startswith("remat.")):
                continue
            data = json.loads(remat.plan(joint, 0.4, solver=name, cost="flops").to_json())
            del data["solve_s"]
            text = json.dumps(data, sort_keys=True)
            found[f"{model_name} {name}"] = hashlib.sha256(text.encode()).hexdigest()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(digests()))
