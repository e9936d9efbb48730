#!/usr/bin/env bash
# torch.compile overwrites an output that the caller holds, without a message, after another function filled the cache.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-30.
# Guess: a compiled graph comes from Inductor's cache only for a step that would be compiled to the same code.
# Seen: a step that returns its loss, then one that also returns the logits: after backward, the logits are other numbers.
# Both steps have the same backward graph, so the second gets the cached code of the first, which overwrites the logits in
# place. Which saved values may be overwritten is not part of the key of Inductor's cache. For the same reason,
# donated_buffer = False, as PyTorch's own message advises for retain_graph=True, does not hold for code that is cached.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
TORCHINDUCTOR_CACHE_DIR=$folder/cache "$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch._functorch import config as functorch
from torch._inductor.utils import fresh_cache


def loss_alone(x, w):
    return ((x @ w).sin() @ w).exp().sum()


def loss_and_logits(x, w):
    logits = (x @ w).sin() @ w
    return logits.exp().sum(), logits.detach()


def inputs():
    torch.manual_seed(0)
    return [torch.randn(8, 8, requires_grad=True) for _ in range(2)]


def compiled(step):
    torch.compiler.reset()
    return torch.compile(step)(*inputs())


def change_of_logits():
    loss, logits = compiled(loss_and_logits)
    before = logits.clone()
    loss.backward()
    return float((logits - before).abs().max())


def change_of_the_gradient():
    loss, given = None, inputs()
    torch.compiler.reset()
    loss = torch.compile(loss_alone)(*given)
    first, second = (torch.autograd.grad(loss, given, retain_graph=True)[0] for _ in range(2))
    return float((first - second).norm() / first.norm())


found = {}
for cached in (False, True):
    with fresh_cache(), functorch.patch(donated_buffer=True):
        if cached:
            compiled(loss_alone).backward()
        found["logits", cached] = change_of_logits()
    with fresh_cache():
        if cached:
            compiled(loss_alone).backward()
        with functorch.patch(donated_buffer=False):
            found["gradient", cached] = change_of_the_gradient()
for (what, cached), change in found.items():
    print(f"{what}, {'after' if cached else 'before'} the other step filled the cache: changes by {change:g}")
assert found["logits", False] == found["gradient", False] == 0
assert found["logits", True] > 1 and found["gradient", True] > 1
PY
