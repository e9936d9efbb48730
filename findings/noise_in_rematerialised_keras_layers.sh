#!/usr/bin/env bash
# On Keras's PyTorch back end, keras.remat around GaussianDropout, SpatialDropout1D or AlphaDropout gives a wrong gradient, without a
# message; around Dropout the gradient is right.
#
# Version: keras 3.15.1 with torch 2.13.0. Seen on 2026-11-30.
# Guess: keras.remat stands on torch.utils.checkpoint, which restores the random state, so every layer draws its noise again.
# Seen: the outputs are the same, and the gradients of three layers are not. These layers count their draws in a variable of the
# layer, which the recomputation counts on. Dropout calls PyTorch's operator, whose state the checkpoint restores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 keras==3.15.1 numpy
KERAS_BACKEND=torch "$folder/venv/bin/python" - <<'PY'
import keras
import torch
from keras import layers


def output_and_gradient(kind, wrapped):
    keras.utils.set_random_seed(0)
    layer = kind(0.5)
    run = keras.remat(lambda x: layer(x, training=True)) if wrapped else lambda x: layer(x, training=True)
    x = torch.ones(4, 8, 16, requires_grad=True)
    y = run(x)
    y.sum().backward()
    return y.detach(), x.grad


for kind in (layers.Dropout, layers.GaussianDropout, layers.SpatialDropout1D, layers.AlphaDropout):
    (output, right), (other, gradient) = (output_and_gradient(kind, wrapped) for wrapped in (False, True))
    print(f"{kind.__name__}: equal outputs {torch.equal(output, other)}, equal gradients {torch.equal(right, gradient)}")
    assert torch.equal(output, other)
    assert torch.equal(right, gradient) == (kind is layers.Dropout)
PY
