#!/usr/bin/env bash
# Compiled code with emulate_precision_casts rounds a Python number beside a bfloat16 tensor; eager PyTorch does not.
#
# Version: torch 2.15.0 on a CPU; 2.14.1 gives the results of eager PyTorch. Seen on 2026-11-29.
# Guess: the setting makes compiled code round as eager PyTorch does, so x * 0.37 has the same bits in both.
# Seen: about 45 % of the products differ. They equal x * bfloat16(0.37), while eager PyTorch multiplies by 0.37 in float32 and
# rounds the product. Without the setting, no product differs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch._inductor import config


def scaled(x):
    return x * 0.37


torch.manual_seed(0)
x = torch.randn(131_072).bfloat16()
differ = {}
for emulated in (False, True):
    torch.compiler.reset()
    with config.patch(emulate_precision_casts=emulated):
        found = torch.compile(scaled)(x)
    differ[emulated] = int((found != scaled(x)).sum())
    print(f"emulate_precision_casts={emulated}: {differ[emulated]:,} of {len(x):,} products differ from eager PyTorch's")
assert torch.equal(found, x * torch.tensor(0.37, dtype=torch.bfloat16))
assert differ[False] == 0
assert differ[True] > len(x) // 4
PY
