#!/usr/bin/env bash
# A selective checkpoint that saves one random operator draws other numbers in the next, so the gradient is wrong, without a message.
#
# Version: torch 2.13.0; 2.14.1 and 2.15.0 do the same. Seen on 2026-11-30.
# Guess: a checkpoint restores the random state, so a policy decides about memory and time only, whichever operators it names.
# Seen: with the policy [aten.rand_like], a dropout behind rand_like drops other elements in backward than in forward. Recomputation
# starts from forward's random state. It takes the saved numbers instead of drawing them, so the state does not advance, and
# dropout draws from where rand_like drew. With dropout in front of rand_like, the gradient is right. Under torch.compile it is right
# in either order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import functools
import logging

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

logging.disable(logging.WARNING)
MM, NOISE = torch.ops.aten.mm.default, torch.ops.aten.rand_like.default
weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def noise_first(x):
    return F.dropout(torch.sin((x + torch.rand_like(x)) @ weight), 0.5)


def noise_last(x):
    return torch.sin(F.dropout(x, 0.5) @ weight) * torch.rand_like(x)


def gradient(block, saved, backend):
    """Output and gradient of a block, checkpointed by a policy that saves these operators, or not checkpointed for None."""
    step = block
    if saved is not None:
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)
        step = functools.partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    torch.compiler.reset()
    torch.manual_seed(1)
    x = torch.ones(8, 8, requires_grad=True)
    y = torch.compile(step, backend=backend)(x) if backend else step(x)
    y.sum().backward()
    return y.detach(), x.grad


for backend, block in ((None, noise_first), (None, noise_last), ("aot_eager", noise_first), ("aot_eager", noise_last)):
    expected = gradient(block, None, backend)
    for saved in ([], [MM], [NOISE]):
        found = gradient(block, saved, backend)
        same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected)]
        print(backend or "eager", block.__name__, [op.name() for op in saved], "same output and gradient:", same)
        assert same[0] and same[1] != (backend is None and block is noise_first and saved == [NOISE])
PY
