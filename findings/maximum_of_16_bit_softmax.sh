#!/usr/bin/env bash
# The compiled gradient through the infinity norm of a bfloat16 product is NaN; eager PyTorch's is finite.
#
# Version: torch 2.13.0. Seen on 2026-11-29.
# Guess: compiled code rounds a little otherwise, so gradients differ in the last digits.
# Seen: backward asks which element equals the norm. Inductor keeps the compared values in float32 inside a kernel, and the
# saved norm is rounded to bfloat16. No element is equal, and the gradient is 0/0.
# With torch._inductor.config.emulate_precision_casts the gradient is finite.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch._inductor import config


def step(x, w):
    h = (x @ w).sigmoid()
    return (h.exp() / torch.linalg.vector_norm(h * 1.1, ord=float("inf"), dim=-1, keepdim=True)).sum()


def nans(run):
    torch.manual_seed(0)
    x, w = (torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    run(x, w).backward()
    return int(x.grad.isnan().sum())


found = {"eager": nans(step), "compiled": nans(torch.compile(step))}
torch._dynamo.reset()
with config.patch(emulate_precision_casts=True):
    found["with rounding emulated"] = nans(torch.compile(step))
print("NaN in the gradient:", found)
assert not found["eager"] and found["compiled"] and not found["with rounding emulated"]
PY
