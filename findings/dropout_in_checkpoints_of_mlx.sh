#!/usr/bin/env bash
# The gradient of a checkpointed MLX module with dropout is wrong, without a message: backward draws another mask than forward.
#
# Version: mlx 0.32.4 on a CPU. Seen on 2026-11-30.
# Guess: a lazy framework knows the random key of each draw, so backward draws forward's mask again, as in PyTorch and JAX.
# Seen: the loss is the same as without the checkpoint, and the gradient is not: inputs that forward dropped get a gradient.
# mlx.core.checkpoint calls the function again, and the second call takes the next key of the global random state. Compiling the
# step with the random state among its inputs does not help.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'mlx[cpu]==0.32.4'
"$folder/venv/bin/python" - <<'PY'
import mlx.core as mx
import mlx.nn as nn

mx.set_default_device(mx.cpu)
dropout = nn.Dropout(0.5)
x = mx.arange(1.0, 33.0)


def loss(x):
    return (dropout(x) * x).sum()


def loss_and_gradient(function, compiled):
    step = mx.value_and_grad(function)
    if compiled:
        step = mx.compile(step, inputs=mx.random.state, outputs=mx.random.state)
    mx.random.seed(0)
    value, gradient = step(x)
    return value.item(), gradient.tolist()


for compiled in (False, True):
    plain, right = loss_and_gradient(loss, compiled)
    checkpointed, wrong = loss_and_gradient(mx.checkpoint(loss), compiled)
    kept = sum(x.tolist()[i] ** 2 * 2 for i, g in enumerate(right) if g)
    differing = sum(a != b for a, b in zip(right, wrong))
    print(f"compiled {compiled}: loss {plain} and {checkpointed}; gradients of {differing} of 32 inputs differ")
    assert plain == checkpointed == kept and differing > 4
PY
