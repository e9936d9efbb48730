#!/usr/bin/env bash
# FlopCounterMode files all that a checkpoint computes again under the module whose backward comes first, as well as where it belongs.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-30.
# Guess: with a checkpoint, each module of the table counts its forward once more.
# Seen: the last layer of the block, of 64 weights, counts 680 times as much as without a checkpoint: 2.1 million operations, those of
# the two wide layers in front of it. Its own product is not run again, as the recomputation stops before it. Recomputation starts
# inside the backward of the last layer, which is still open in the module tracker. So children add up to more than their parent.
# Totals are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

TOKENS, WIDTH = 8, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Model(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.block, self.kept = Block(), kept

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.kept else self.block(x)


def flops(kept):
    """Floating-point operations of a step by module."""
    model, x = Model(kept), torch.randn(TOKENS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False, depth=9) as counter:
        model(x).sum().backward()
    return {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


plain, kept = flops(False), flops(True)
for name in sorted(plain):
    print(f"{name}: {plain[name]} without a checkpoint, {kept[name]} with it")
wide = 2 * TOKENS * WIDTH * 1024
layers = [f"Model.block.{name}" for name in ("up", "down", "head")]
assert [plain[name] for name in layers] == [3 * wide, 3 * wide, 3 * 2 * TOKENS * WIDTH]
assert sum(plain[name] for name in layers) == plain["Model.block"] == plain["Global"]
assert [kept[name] - plain[name] for name in layers] == [wide, wide, 2 * wide]
assert kept["Global"] - plain["Global"] == kept["Model.block"] - plain["Model.block"] == 2 * wide
PY
