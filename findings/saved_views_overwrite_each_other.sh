#!/usr/bin/env bash
# torch.compile gives a wrong gradient, without a message, if forward saves two views of one complex tensor.
#
# Version: torch 2.13.0 (2.14.1 and 2.15.0: see below). Seen on 2026-11-30.
# Guess: compiled gradients of complex numbers equal eager PyTorch's but for rounding, as those of real numbers do.
# Seen: the gradient of the scalar is twice as large. Forward saves a conjugate and a real view of the same memory. Inductor's
# backward scales the real view in place, then reads the conjugate. AOTAutograd lets backward overwrite a saved tensor if the
# memory is not that of an input or output; it does not compare saved tensors with each other. With donated_buffer = False, or
# with inplace_buffers = False, the gradient is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
TORCHINDUCTOR_CACHE_DIR=$folder/cache "$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch._functorch import config as functorch
from torch._inductor import config as inductor


def step(scale, x):
    z = torch.view_as_complex(x.sin())
    return (torch.view_as_real(scale * z) ** 2).sum() + (torch.view_as_real(z) ** 2).sum()


def gradient(run):
    torch.manual_seed(0)
    scale, x = torch.tensor(0.75, requires_grad=True), torch.randn(16, 16, 2, requires_grad=True)
    torch.compiler.reset()
    run(scale, x).backward()
    return scale.grad.item()


found = {"eager": gradient(step), "aot_eager": gradient(torch.compile(step, backend="aot_eager"))}
with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False):
    found["inductor"] = gradient(torch.compile(step))
    with functorch.patch(donated_buffer=False):
        found["without donated buffers"] = gradient(torch.compile(step))
    with inductor.patch(inplace_buffers=False):
        found["without in-place kernels"] = gradient(torch.compile(step))
for how, value in found.items():
    print(f"{how}: {value:.4f}")
wrong = found.pop("inductor")
assert max(found.values()) - min(found.values()) < 1e-2 * found["eager"]
assert abs(wrong - 2 * found["eager"]) < 1e-2 * found["eager"]
PY
