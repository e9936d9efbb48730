#!/usr/bin/env bash
# With options, F.linear_cross_entropy ignores autocast: products are in float32, or the loss is in bfloat16.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: LinearCrossEntropyOptions only splits the logits into chunks, so under autocast products are bfloat16 and the loss is float32,
# as without options.
# Seen: the chunked loss is one custom operator, to which autocast does nothing. Float32 inputs are multiplied in float32. The usual
# case, bfloat16 activations and a float32 weight, adds up the loss in bfloat16: 18.25 instead of 18.58. With acc_policy="compact"
# it is a RuntimeError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

torch.manual_seed(0)
hidden, weight = torch.randn(256, 32), torch.randn(1000, 32)
target = torch.randint(1000, (256,))


def loss(dtype, options):
    """The loss of hidden states of a dtype and a float32 weight, under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        try:
            return F.linear_cross_entropy(hidden.to(dtype).requires_grad_(), weight.requires_grad_(), target, options=options)
        except RuntimeError as error:
            return str(error)


in_float32 = F.linear_cross_entropy(hidden, weight, target)
chunked, compact = LinearCrossEntropyOptions(), LinearCrossEntropyOptions(acc_policy="compact")
for dtype in (torch.float32, torch.bfloat16):
    for name, options in (("whole", None), ("chunked", chunked), ("compact", compact)):
        print(f"{dtype}, {name}: {loss(dtype, options)}")
assert abs(loss(torch.float32, None) - in_float32) > 1e-4
assert abs(loss(torch.float32, chunked) - in_float32) < 1e-5
assert loss(torch.bfloat16, None).dtype is torch.float32
assert loss(torch.bfloat16, chunked).dtype is torch.bfloat16
assert abs(loss(torch.bfloat16, chunked) - in_float32) > 10 * abs(loss(torch.bfloat16, None) - in_float32)
assert "to have the same dtype" in loss(torch.bfloat16, compact)
PY
