#!/usr/bin/env bash
# The gradient through dropout inside torch.cond is wrong in eager mode and compiled, without a message, budget or checkpoint.
#
# Version: torch 2.13.0; 2.15.0 does the same. Seen on 2026-11-30.
# Guess: torch.cond differentiates a branch as autograd differentiates the same code without torch.cond.
# Seen: elements that forward dropped get a gradient, and elements that forward kept get none. The backward of torch.cond runs the
# branch again to get what it needs, and draws another mask. torch._higher_order_ops.map does the same; scan keeps the mask.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
export TORCHINDUCTOR_CACHE_DIR="$folder/cache"
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
import torch.nn.functional as F
from torch._higher_order_ops.map import map as each
from torch._higher_order_ops.scan import scan


def drop(x):
    return F.dropout(torch.sin(x), 0.5)


functions = {
    "plain": drop,
    "cond": lambda x: torch.cond(x.sum() > 0, drop, torch.cos, (x,)),
    "map": lambda x: each(drop, x),
    "scan": lambda x: scan(lambda state, row: (state + 1, drop(row)), torch.zeros(500), x)[1],
}


def right(function, **how):
    """Whether the gradient is 0 exactly where forward dropped the element."""
    torch.compiler.reset()
    x = torch.ones(2, 500, requires_grad=True)
    y = (torch.compile(function, **how) if how else function)(x)
    y.sum().backward()
    return torch.equal(x.grad == 0, y == 0)


for name, function in functions.items():
    found = right(function), right(function, backend="aot_eager")
    print(f"{name}: eager {'right' if found[0] else 'wrong'}, aot_eager {'right' if found[1] else 'wrong'}")
    assert found == ((name in ("plain", "scan")),) * 2
assert not right(functions["cond"], backend="inductor")
PY
