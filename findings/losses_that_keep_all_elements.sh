#!/usr/bin/env bash
# The scalar that mse_loss returns on a CPU keeps the memory of all elements, so a list of losses grows by that much each step.
#
# Version: torch 2.13.0. Seen on 2026-11-30.
# Guess: a mean over 1,000 float32 elements returns a tensor of 4 bytes, as l1_loss does, and as meta tensors say.
# Seen: the storage has 4,000 bytes for mse_loss, smooth_l1_loss, binary_cross_entropy and soft_margin_loss: the kernel shrinks
# the result of the elements to a scalar, and not its storage. detach() shares this storage. l1_loss, huber_loss and
# binary_cross_entropy_with_logits return 4 bytes. So does Inductor's code for mse_loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch.nn import functional as F

LARGE = F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss
SMALL = F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits
x, y = torch.rand(1000), torch.ones(1000)


def stored(loss, device):
    result = loss(x.to(device), y.to(device)).detach()
    assert result.shape == ()
    return result.untyped_storage().nbytes()


for loss in (*LARGE, *SMALL):
    print(f"{loss.__name__}: {stored(loss, 'cpu')} bytes on the CPU, {stored(loss, 'meta')} on meta")
assert all(stored(loss, "cpu") == 4000 and stored(loss, "meta") == 4 for loss in LARGE)
assert all(stored(loss, "cpu") == 4 for loss in SMALL)
PY
