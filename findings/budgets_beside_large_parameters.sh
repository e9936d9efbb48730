#!/usr/bin/env bash
# activation_memory_budget changes nothing beside an embedding table, or under autocast, if activations are small beside parameters.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: a budget of 0.1 saves about a tenth of the bytes that a budget of 1 saves, whatever the parameters are.
# Seen: in front of 100,000 embeddings, or under autocast, the budgets 1, 0.9, 0.5 and 0.1 save the same bytes. With 20,000, or with
# more tokens, 0.9 saves less than it does otherwise. PyTorch's partitioner takes the inputs of the step as the least that can be saved.
# Among them are all parameters, also those that backward does not read: an embedding table, and the float32 weights of which
# forward saves 16-bit copies under autocast. If the least exceeds the most, the budget is not read. Else the budget is a share of
# their difference, which is too small.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch._functorch import config

WIDTH, LAYERS, BUDGETS = 128, 4, (1, 0.9, 0.5, 0.1, 0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def saved(words, tokens, cast, budget):
    """Bytes that forward saves beside the parameters."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Embedding(words, WIDTH), *[Block() for _ in range(LAYERS)])
    with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = compiled(torch.randint(0, words, (tokens,)))
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in y.grad_fn.saved_tensors}
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())


def shares(words, tokens, cast):
    """Saved bytes by budget, as a share of those of budget 1."""
    sizes = {budget: saved(words, tokens, cast, budget) for budget in BUDGETS}
    text = ", ".join(f"{size / 1e6:.2f} MB at {budget}" for budget, size in sizes.items())
    print(f"{words} embeddings, {tokens} tokens, autocast {cast}: {text}")
    return {budget: size / sizes[1] for budget, size in sizes.items()}


usual = shares(100, 1024, cast=False)
assert 0.7 < usual[0.9] < 0.9 and 0.3 < usual[0.5] < 0.5
for unread in (shares(100_000, 1024, cast=False), shares(100, 64, cast=True)):
    assert unread[0.9] == unread[0.5] == unread[0.1] == 1 and unread[0] < 0.05
for exceeded in (shares(20_000, 1024, cast=False), shares(100, 1024, cast=True)):
    assert exceeded[0.9] < 0.85 * usual[0.9]
PY
