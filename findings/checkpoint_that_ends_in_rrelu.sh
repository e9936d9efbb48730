#!/usr/bin/env bash
# The gradient of a checkpointed module that ends in nn.RReLU is wrong, without a message.
#
# Version: torch 2.13.0. Seen on 2026-11-29. Known upstream as issue 193671 of PyTorch.
# Guess: checkpointing restores the random state, so the recomputed noise and the gradient are those of forward.
# Seen: the gradient differs from that without a checkpoint. With early stopping off, both are equal. Autograd saves the
# noise before the operator fills it, and the recomputation ends as soon as the last tensor is saved.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.RReLU()).train()


def gradient(run):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 128).view(8, 16).requires_grad_()
    run(x).sum().backward()
    return x.grad


plain = gradient(model)
wrong = gradient(lambda x: checkpoint(model, x, use_reentrant=False))
with set_checkpoint_early_stop(False):
    right = gradient(lambda x: checkpoint(model, x, use_reentrant=False))
print("equal with early stopping:", torch.equal(plain, wrong), "- without:", torch.equal(plain, right))
assert not torch.allclose(plain, wrong) and torch.equal(plain, right)
PY
