#!/usr/bin/env bash
# The gradient of a checkpointed module with spectral_norm or FakeQuantize is wrong, without a message, in eager mode and compiled.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-30.
# Guess: as with BatchNorm, recomputation updates the module's state a second time, and the gradient is right.
# Seen: BatchNorm normalises by the batch, and reads no state. spectral_norm divides the weight by an estimate that each forward refines
# first, and FakeQuantize rounds by a range that each forward moves first. So recomputation has another weight, or other rounded
# values, than forward had: here, the gradient is 3 % off, and for spectral_norm still 1 % after twenty more steps. A checkpoint
# compares shapes and types of what it computes again, not values. With a state that is frozen, the gradient is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import copy
import functools

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, disable_observer
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
x = torch.randn(16, 32)
MODULES = {
    "BatchNorm1d": nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()),
    "spectral_norm": nn.Sequential(spectral_norm(nn.Linear(32, 32)), nn.Tanh()),
    "FakeQuantize": nn.Sequential(nn.Linear(32, 32), FakeQuantize(), nn.Tanh()),
}


def gradients(module, kept, backend):
    module = copy.deepcopy(module)
    step = functools.partial(checkpoint, module, use_reentrant=False) if kept else module
    torch.compiler.reset()
    y = torch.compile(step, backend=backend)(2 * x) if backend else step(2 * x)
    y.square().sum().backward()
    return y.detach(), torch.cat([p.grad.flatten() for p in module.parameters()])


def error(module, backend=None):
    """Relative error of the gradient of the checkpointed module."""
    (y, right), (same, found) = gradients(module, False, backend), gradients(module, True, backend)
    assert torch.equal(y, same)
    return ((found - right).norm() / right.norm()).item()


for name, module in MODULES.items():
    module(x)
    later, frozen = copy.deepcopy(module), copy.deepcopy(module).eval().apply(disable_observer)
    for _ in range(20):
        later(x)
    errors = [error(module), error(module, "aot_eager"), error(later), error(frozen)]
    print(name, "eager {:.1%}, compiled {:.1%}, twenty steps later {:.1%}, with a frozen state {:.1%}".format(*errors))
    assert errors[3] < 1e-6
    assert all((e < 1e-6) if name == "BatchNorm1d" else (e > 5e-3) for e in errors[:3])
PY
