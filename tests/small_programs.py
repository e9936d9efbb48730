"""Small programs whose compiled peak depends on operators that PyTorch computes: convolutions, recurrent cells, 16-bit products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

#: A program, which returns a loss, and the tensors whose gradients count.
Program = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]
BF16, COMPLEX = torch.bfloat16, torch.complex64


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def _of(*modules: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Program:
    """The sum of what modules in turn make of one input."""
    model, x = nn.Sequential(*modules).to(dtype), _tensor(*shape, dtype=dtype)
    return lambda: model(x).sum(), [x, *model.parameters()]


def _unrolled(cell: nn.RNNCellBase, steps: int) -> Program:
    """The last state of a recurrent cell, and of its step as a loop in Python."""
    x = _tensor(16, steps, cell.input_size)

    def run() -> torch.Tensor:
        state: Any = None
        for at in range(steps):
            state = cell(x[:, at], state)
        return (state[0] if isinstance(state, tuple) else state).sum()

    return run, [x, *cell.parameters()]


def _by(f: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Program:
    return lambda: f(*tensors).sum(), list(tensors)


def _images(*modules: nn.Module) -> Program:
    return _of(nn.Conv2d(3, 8, 3, padding=1), *modules, shape=(2, 3, 24, 24))


def _encoder(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)


#: Single operators, most of which Inductor calls.
OPERATORS: Mapping[str, Callable[[], Program]] = {
    "conv1d": lambda: _of(nn.Conv1d(16, 3, 4, 2, 1), shape=(2, 16, 100)),
    "conv1d, long": lambda: _of(nn.Conv1d(16, 32, 5), shape=(4, 16, 1000)),
    "conv1d, one element": lambda: _of(nn.Conv1d(16, 32, 1), shape=(4, 16, 1000)),
    "conv1d, depthwise": lambda: _of(nn.Conv1d(32, 32, 7, padding=3, groups=32), shape=(2, 32, 500)),
    "conv1d, transposed": lambda: _of(nn.ConvTranspose1d(16, 3, 4, 2, 1), shape=(2, 16, 100)),
    "conv2d": lambda: _of(nn.Conv2d(3, 16, 3), shape=(2, 3, 32, 32)),
    "conv2d, strided": lambda: _of(nn.Conv2d(16, 32, 3, 2), shape=(2, 16, 32, 32)),
    "conv2d, one element": lambda: _of(nn.Conv2d(16, 32, 1), shape=(2, 16, 32, 32)),
    "conv2d, patches": lambda: _of(nn.Conv2d(3, 256, 16, 16), shape=(2, 3, 64, 64)),
    "conv2d, depthwise": lambda: _of(nn.Conv2d(32, 32, 7, padding=3, groups=32), shape=(2, 32, 28, 28)),
    "conv2d, grouped": lambda: _of(nn.Conv2d(32, 32, 3, padding=1, groups=4), shape=(2, 32, 28, 28)),
    "conv2d, dilated": lambda: _of(nn.Conv2d(8, 8, 3, padding=2, dilation=2), shape=(2, 8, 28, 28)),
    "conv2d, transposed": lambda: _of(nn.ConvTranspose2d(16, 8, 4, 2, 1), shape=(2, 16, 16, 16)),
    "conv3d": lambda: _of(nn.Conv3d(3, 8, 3), shape=(2, 3, 8, 8, 8)),
    "conv3d, strided": lambda: _of(nn.Conv3d(8, 16, 3, 2, 1), shape=(2, 8, 12, 12, 12)),
    "conv3d, transposed": lambda: _of(nn.ConvTranspose3d(8, 4, 2, 2), shape=(2, 8, 6, 6, 6)),
    "GRU cell": lambda: _unrolled(nn.GRUCell(32, 64), 5),
    "LSTM cell": lambda: _unrolled(nn.LSTMCell(32, 64), 5),
    "RNN cell": lambda: _unrolled(nn.RNNCell(32, 64), 5),
    "one LSTM cell": lambda: _unrolled(nn.LSTMCell(64, 64), 1),
    "upsampling, bilinear": lambda: _images(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 3, 3)),
    "upsampling, nearest": lambda: _images(nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3)),
    "upsampling, bicubic": lambda: _images(nn.Upsample(scale_factor=2, mode="bicubic"), nn.ReLU(), nn.Conv2d(8, 3, 3)),
    "pixel shuffle": lambda: _images(nn.Conv2d(8, 16, 3), nn.PixelShuffle(2), nn.Conv2d(4, 3, 3)),
    "amax, bf16": lambda: _by(lambda a, b: (a @ b).amax(-1), _tensor(64, 64, dtype=BF16), _tensor(64, 64, dtype=BF16)),
    "topk, bf16": lambda: _by(lambda a, b: (a @ b).topk(2)[0], _tensor(64, 64, dtype=BF16), _tensor(64, 64, dtype=BF16)),
    "argmax, bf16": lambda: _by(
        lambda a, b: (a @ b).gather(1, (a @ b).argmax(-1, keepdim=True)),
        _tensor(64, 64, dtype=BF16),
        _tensor(64, 64, dtype=BF16),
    ),
    "real view": lambda: _by(lambda z, s: torch.view_as_real(z * s), _tensor(32, 32, dtype=COMPLEX), _tensor(32, 32)),
    "complex angle": lambda: _by(lambda a: a.T.abs().sin() + a.T.angle(), _tensor(32, 48, dtype=COMPLEX)),
    "fft": lambda: _by(lambda x, w: torch.fft.rfft(x @ w).abs(), _tensor(16, 32), _tensor(32, 32)),
    "sort": lambda: _by(lambda x, w: (x @ w).sort(-1)[0], _tensor(16, 32), _tensor(32, 32)),
    "embedding bag": lambda: _by(
        lambda w: nn.functional.embedding_bag(torch.arange(128).view(16, 8) % 50, w), _tensor(50, 32)
    ),
}  # fmt: skip

#: Nets of a few layers.
NETS: Mapping[str, Callable[[], Program]] = {
    "conv1d net": lambda: _of(nn.Conv1d(16, 32, 5), nn.ReLU(), nn.Conv1d(32, 32, 5), nn.GELU(), nn.Conv1d(32, 16, 3), shape=(4, 16, 1000)),
    "transposed 1d net": lambda: _of(nn.ConvTranspose1d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose1d(8, 4, 4, 2, 1), shape=(2, 16, 500)),
    "transposed 2d net": lambda: _of(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), shape=(2, 16, 16, 16)),
    "conv3d net": lambda: _of(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 4, 3), shape=(2, 3, 12, 12, 12)),
    "classifier": lambda: _images(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    "separable": lambda: _images(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1), nn.Hardswish(), nn.Conv2d(16, 16, 3, padding=1, groups=16)),
    "group norms": lambda: _images(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()),
    "pooling": lambda: _images(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)),
    "patches": lambda: _of(nn.Conv2d(3, 64, 8, 8), nn.Flatten(2), nn.LayerNorm(16), nn.GELU(), shape=(4, 3, 32, 32)),
    "encoder": lambda: _of(_encoder(0.1), shape=(4, 16, 32)),
    "two encoders": lambda: _of(_encoder(0.0), _encoder(0.0), shape=(4, 16, 32)),
    "perceptron": lambda: _of(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), shape=(128, 64)),
    "perceptron, bf16": lambda: _of(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), shape=(128, 64), dtype=BF16),
    "deep perceptron": lambda: _of(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())), shape=(256, 64)),
    "gated": lambda: _by(lambda x, w, v, o: ((x @ w).sigmoid() * (x @ v)) @ o, _tensor(128, 64), _tensor(64, 256), _tensor(64, 256), _tensor(256, 64)),
    "attention": lambda: _by(lambda q, k, v: nn.functional.scaled_dot_product_attention(q.sin(), k.cos(), v), *(_tensor(2, 4, 64, 16) for _ in range(3))),
}  # fmt: skip

PROGRAMS = {**OPERATORS, **NETS}
