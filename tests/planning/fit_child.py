"""A process that trains within hard limits on its memory: ``python fit_child.py BATCH OPTIMIZER BUDGET=MEMORY,... ...``.

For each budget, and each memory, it prints "ran" after a whole step within the limit, and "died" where an allocation failed. It
exits with anything but 0 where something else failed.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable

import torch
from torch import nn

import remat
from remat.running.optimizer import read_optimizer

WIDTH = 768


def model() -> nn.Module:
    """Layers whose activations are worth a decision: about 19 MB of parameters."""
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


def main() -> None:
    batch, optimizer, *asked = sys.argv[1:]
    torch.set_num_threads(1)
    for budget, _, memories in (each.partition("=") for each in asked):
        within(int(batch), optimizer, budget, map(int, memories.split(",")))
        torch.compiler.reset()
        gc.collect()


def within(batch: int, optimizer: str, budget: str, memories: Iterable[int]) -> None:
    trained = model()
    compiled = torch.compile(trained, backend="remat", options={"budget": budget, "lower": "eager"})
    stepping = read_optimizer(optimizer)[1](list(trained.parameters()))
    x = torch.randn(batch, WIDTH)

    def train() -> None:
        out = compiled(x)
        out.backward(torch.ones_like(out))
        stepping.step()
        stepping.zero_grad()

    train()  # compiles, and makes the state
    state = (v for s in stepping.state.values() for v in s.values() if torch.is_tensor(v))
    mine = sum(t.untyped_storage().nbytes() for t in (*trained.parameters(), *state, x))
    own = taken_bytes() - mine  # of the process itself
    for memory in memories:
        resource.setrlimit(resource.RLIMIT_DATA, (own + memory, resource.RLIM_INFINITY))
        try:
            train()
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            print("died")
        else:
            print("ran")
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    assert remat.__version__
    main()
