"""The program of the tutorial, a small GPT: ``python examples/tutorial.py --memory 200MiB``.

No GPU is needed: after its first step, which may compile, the process is given a device's memory, and what
it allocates beyond that fails. That works on Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import sys

import torch
from torch import nn

import remat

WIDTH, LAYERS, SEQ, VOCAB = 192, 3, 128, 1024


class GPT(nn.Module):
    """Decoder-only transformer with dropout that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        blocks = [
            nn.TransformerEncoderLayer(
                WIDTH, nhead=4, dim_feedforward=4 * WIDTH, activation="gelu", batch_first=True
            )
            for _ in range(LAYERS)
        ]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQ))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def build(batch: int = 32) -> tuple[nn.Module, tuple[torch.Tensor], dict[str, object]]:
    """A model and the arguments of a call, as `remat plan` and `remat fit` ask for them."""
    torch.manual_seed(0)
    return GPT(), (torch.randint(VOCAB, (batch, SEQ + 1)),), {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory", default="200MiB", help="of the device that is played (200MiB)")
    parser.add_argument("--batch", type=int, default=32, help="texts in a step (32)")
    parser.add_argument("--budget", help="of remat; without it the step is eager PyTorch's")
    asked = parser.parse_args()
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once

    model, (tokens,), _ = build(asked.batch)
    if asked.budget:
        model.compile(backend="remat", options={"budget": asked.budget, "lower": "eager"})
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    print(f"step 1: loss {step():.6f}")
    limit_memory(remat.Peak(asked.memory).nbytes or 0, model, optimizer, tokens)
    try:
        for k in (2, 3):
            print(f"step {k}: loss {step():.6f}")
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        print(f"out of memory: the step does not fit {asked.memory}")
        return 1
    if asked.budget:
        (plan,) = remat.plans()
        print(plan.explain())
    return 0


def limit_memory(
    size: int, model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor
) -> None:
    """Lets the process allocate no more than a device of this size has, what it holds already included."""
    state = (v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
    held = (*model.parameters(), *model.buffers(), *state, *inputs)
    with open("/proc/self/status") as status:
        taken = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    limit = 1024 * taken - sum(t.untyped_storage().nbytes() for t in held) + size
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
