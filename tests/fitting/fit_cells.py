"""Whole training steps on the CPU: the peak that `remat.fit` predicts, and the allocator's.

The step (forward, backward, the optimizer's step, no gradients after it) really trains, by the eager lowering. Its peak is
that of the profiler's record of every allocation.
"""

from __future__ import annotations

from typing import Any

import torch

import remat
from remat.cli.hf import build
from remat.running.measure import allocations
from remat.running.optimizer import read_optimizer


def cells(
    name: str,
    overrides: tuple[str, ...],
    optimizer: str,
    *,
    batch: int = 4,
    seq: int | None = 128,
    tight: float = 0.93,
) -> list[dict[str, Any]]:
    """A model with an optimizer, at budget 1 and within less: predicted and measured.

    Args:
        name: a type of `transformers`' models.
        overrides: of its config.
        optimizer: as in `remat.fit`.
        batch: samples.
        seq: tokens; images have none.
        tight: share of the peak at budget 1 that the second step is given.
    """
    seq = None if name in ("vit", "resnet") else seq

    def given(at: int) -> dict[str, Any]:
        return dict(build(name, overrides, batch=at, seq=seq).kwargs)

    model = build(name, overrides, batch=batch, seq=seq).model
    found: list[dict[str, Any]] = []
    memory = 1 << 40
    for _ in range(2):
        row = remat.fit(
            model,
            given,
            memory=memory,
            optimizer=optimizer,
            batches=batch,
            lower="eager",
            cost="roofline:cpu",
        ).rows[0]
        assert row.budget is not None, row.reason
        allocated = allocated_peak(name, overrides, optimizer, batch, seq, row.budget)
        found.append(
            {
                "optimizer": optimizer,
                "budget": row.budget,
                "memory": memory,
                "predicted": row.peak_bytes,
                "allocated": allocated,
                "off": round(row.peak_bytes / allocated - 1, 6),
            }
        )
        memory = int(tight * row.peak_bytes)
    return found


def allocated_peak(
    name: str,
    overrides: tuple[str, ...],
    optimizer: str,
    batch: int,
    seq: int | None,
    budget: str,
) -> int:
    """Trains under a budget, and returns the most bytes that are allocated in the third step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    example = build(name, overrides, batch=batch, seq=seq, device="cpu")
    options = {"budget": budget, "lower": "eager"}
    compiled = torch.compile(example.model, backend="remat", options=options)
    stepping = read_optimizer(optimizer)[1](list(example.model.parameters()))

    def train() -> None:
        out = compiled(*example.args, **example.kwargs)
        out.loss.backward()
        stepping.step()
        stepping.zero_grad()

    train()
    train()
    state = (v for s in stepping.state.values() for v in s.values())
    alive = [
        *example.model.parameters(),
        *example.model.buffers(),
        *example.kwargs.values(),
        *state,
    ]
    storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in alive if torch.is_tensor(t)}
    with allocations() as events:
        train()
    current = peak = sum(storages.values())
    for nbytes in events:
        current += nbytes
        peak = max(peak, current)
    return peak
