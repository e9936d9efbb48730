#!/usr/bin/env bash
# Under autocast, activation_memory_budget changes nothing as long as activations take less than half the bytes of the parameters.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: a budget of 0.1 saves about a tenth of the bytes that a budget of 1 saves, with autocast and without.
# Seen: under autocast, 64 tokens save 6.7 MB at the budgets 1, 0.9, 0.5 and 0.1. With 1,024 tokens, 0.9 saves a third of the bytes.
# PyTorch's partitioner takes the inputs of the step as the least that can be saved. These include the float32 parameters. Under
# autocast, forward saves 16-bit copies of the weights, half as large, so the most may be less than the "least": then the budget is
# not read. Else the budget is a share of a difference that is too small by half the parameters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch._functorch import config

WIDTH, LAYERS, BUDGETS = 256, 6, (1, 0.9, 0.5, 0.1, 0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def saved(tokens, cast, budget):
    """Bytes that forward saves beside the parameters."""
    torch.compiler.reset()
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = compiled(torch.randn(tokens, WIDTH))
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in y.grad_fn.saved_tensors}
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())


shares = {}
for tokens in (64, 1024):
    for cast in (False, True):
        sizes = [saved(tokens, cast, budget) for budget in BUDGETS]
        shares[tokens, cast] = [size / sizes[0] for size in sizes]
        print(f"{tokens} tokens, autocast {cast}:", *(f"{size / 1e6:.2f} MB at {b};" for b, size in zip(BUDGETS, sizes)))
assert shares[64, True][:4] == [1, 1, 1, 1] and shares[64, True][4] < 0.05
assert shares[1024, True][1] < 0.4
assert shares[64, False][2] < 0.5 and 0.8 < shares[1024, False][1] < 0.9
PY
