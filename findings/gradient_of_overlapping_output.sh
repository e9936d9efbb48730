#!/usr/bin/env bash
# torch.compile gives a wrong gradient, without a message, if the function returns a view whose elements share memory.
#
# Version: torch 2.13.0 (2.14.1 and 2.15.0 do the same). Seen on 2026-11-29.
# Guess: the layout of an output does not change its gradient; expand() and unfold() behave alike.
# Seen: after unfold(), positions that several windows read get a wrong gradient under aot_eager and inductor. After
# expand(), the gradient is right. AOTAutograd copies the incoming gradient into the layout of the output, where
# elements overwrite each other; it makes an exception only where PyTorch is sure of an overlap, which it is for stride 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch

STEPS = {
    "unfold": lambda x: (x * x).unfold(0, 2, 1),
    "expand": lambda x: (x * x)[None].expand(4, 3, 2),
}
seen = {}
for name, step in STEPS.items():
    gradients = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        x = torch.arange(1.0, 7.0).reshape(3, 2).requires_grad_()
        out = torch.compile(step, backend=backend)(x)
        (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
        gradients.append(x.grad)
    seen[name] = torch.equal(*gradients)
    print(f"{name}: eager {gradients[0].tolist()}, compiled {gradients[1].tolist()}")
assert seen == {"unfold": False, "expand": True}, seen
PY
