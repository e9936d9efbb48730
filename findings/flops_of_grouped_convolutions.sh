#!/usr/bin/env bash
# PyTorch counts the backward of a grouped convolution as 1 + groups times its forward.
#
# Version: torch 2.13.0. Seen on 2026-11-29.
# Guess: backward has two products of the size of forward, so it counts twice as much, whatever the groups.
# Seen: FlopCounterMode counts 2 times for 1 group, and 65 times for the 64 groups of a depthwise convolution.
# Source: torch/utils/flop_counter.py, conv_backward_flop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch.utils.flop_counter import FlopCounterMode


def counted(groups):
    layer = torch.nn.Conv2d(64, 64, 3, groups=groups, bias=False)
    x = torch.ones(1, 64, 16, 16, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        loss = layer(x).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return backward.get_total_flops() / forward.get_total_flops()


for groups in (1, 4, 64):
    print(f"groups {groups}: backward counts {counted(groups):g} times forward")
assert [counted(g) for g in (1, 4, 64)] == [2, 5, 65]
PY
