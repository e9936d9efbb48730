#!/usr/bin/env bash
# torch.autograd.graph.save_on_cpu turns PyTorch's error about an overwritten tensor into a wrong gradient, if tensors are on a CPU.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: save_on_cpu copies each saved tensor, so a later write in place does no harm; or, without a copy, autograd refuses backward.
# Seen: neither. For a tensor on a CPU, Tensor.cpu() is the tensor itself, so backward reads what was written. Autograd compares
# versions of tensors only without hooks. With pin_memory=True, or on another device, a copy is made, and the gradient is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import contextlib

import torch


def gradient(hooks, write):
    x = torch.ones(4, requires_grad=True)
    with hooks:
        y = torch.exp(x)
        z = torch.sin(y)
        if write:
            y.mul_(2)  # sin and exp have both saved y
        z.sum().backward()
    return x.grad


expected = gradient(contextlib.nullcontext(), write=False)
try:
    gradient(contextlib.nullcontext(), write=True)
except RuntimeError as error:
    refused = str(error)
found = gradient(torch.autograd.graph.save_on_cpu(), write=True)
print("without hooks:", refused[:90])
print("with save_on_cpu:", found[0].item(), "instead of", expected[0].item())
assert "modified by an inplace operation" in refused
assert torch.allclose(gradient(torch.autograd.graph.save_on_cpu(), write=False), expected)
assert not torch.allclose(found, expected, rtol=0.1)
PY
