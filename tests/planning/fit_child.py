"""A process that trains within a hard limit on its memory: ``python fit_child.py BATCH BUDGET MEMORY OPTIMIZER``.

It exits with 0 after two whole steps within the limit, with 3 where an allocation failed, and with anything
else where something else did.
"""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn

import remat
from remat.running.optimizer import read_optimizer

WIDTH = 1536


def model() -> nn.Module:
    """Layers whose activations are worth a decision: about 70 MB of parameters."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers)


def given(batch: int) -> tuple[torch.Tensor]:
    return (torch.empty(batch, WIDTH, device="meta"),)


def taken_bytes() -> int:
    """Private memory of this process that it may write to: what the limit is on."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def main() -> int:
    batch, budget, memory, optimizer = sys.argv[1:]
    torch.set_num_threads(1)
    trained = model()
    compiled = torch.compile(trained, backend="remat", options={"budget": budget, "lower": "eager"})
    stepping = read_optimizer(optimizer)[1](list(trained.parameters()))
    x = torch.randn(int(batch), WIDTH)

    def train() -> None:
        out = compiled(x)
        out.backward(torch.ones_like(out))
        stepping.step()
        stepping.zero_grad()

    train()  # compiles, and makes the state
    state = (v for s in stepping.state.values() for v in s.values() if torch.is_tensor(v))
    mine = sum(t.untyped_storage().nbytes() for t in (*trained.parameters(), *state, x))
    own = taken_bytes() - mine  # of the process itself
    limit = own + int(memory)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        train()
        train()
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return 3
    return 0


if __name__ == "__main__":
    assert remat.__version__
    sys.exit(main())
