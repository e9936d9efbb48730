"""The nine networks of HiRemate's experiments (Gusak et al., ICML 2025), at sizes that fit one GPU of their time.

Sizes follow the authors' public code where it has them: https://github.com/topal-team/rockmate. The definitions follow
the papers of the networks. Spectral weights are pairs of real numbers, because ``Module.to`` makes complex ones real.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from benchmarks.workloads import Batch, Workload, images, text

Sizes = tuple[int, ...]
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Classifier(nn.Module):
    """The loss of a network that gives logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(x), labels)


class Regression(nn.Module):
    """The loss of a network that gives a field, such as the solution of a differential equation."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # The scalar that `mse_loss` returns holds the bytes of all squares, and no fake tensor shows them.
        return (self.network(x) - y).square().mean()


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.of_tokens = nn.Sequential(
            nn.Linear(tokens, width // 2), nn.GELU(), nn.Linear(width // 2, tokens)
        )
        self.of_channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.of_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.of_channels(self.norms[1](x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021)."""

    def __init__(self, side: int, patch: int = 16, width: int = 512, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        tokens = (side // patch) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(tokens, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015) with batch norm; skips are concatenated."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(self._block(a, b) for a, b in [(3, width), *pairs])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(self._block(2 * a, a) for a in widths[:-1])
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Module:
        layers = (
            (nn.Conv2d(c, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU())
            for c in (inner, outer)
        )
        return nn.Sequential(*itertools.chain.from_iterable(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down[0](x)
        skips = []
        for block in self.down[1:]:
            skips.append(x)
            x = block(nn.functional.max_pool2d(x, 2))
        for grow, block in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = block(torch.cat((grow(x), skips.pop()), dim=1))
        return torch.sigmoid(self.out(x))


class EncoderDecoder(nn.Module):
    """PyTorch's own Transformer (Vaswani et al., 2017), sequence first."""

    def __init__(self, layers: int = 6, width: int = 512, heads: int = 16) -> None:
        super().__init__()
        self.network = nn.Transformer(
            width, heads, num_encoder_layers=layers, num_decoder_layers=layers
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.network(source, target) - y).square().mean()


def spectrum(x: torch.Tensor, modes: Sizes) -> torch.Tensor:
    """The low frequencies of a field: at both ends of each axis but the last, whose other end is not stored."""
    y = torch.fft.rfftn(x, dim=tuple(range(2, x.dim())), norm="forward")[..., : modes[-1]]
    for axis, n in enumerate(modes[:-1], start=2):
        y = torch.cat((y.narrow(axis, 0, n), y.narrow(axis, y.shape[axis] - n, n)), axis)
    return y


def of_spectrum(y: torch.Tensor, size: Sizes) -> torch.Tensor:
    """The field of a size that has these low frequencies, and no others."""
    for axis, points in enumerate(size[:-1], start=2):
        n = y.shape[axis] // 2
        low, high = y.split(n, axis)
        between = [*y.shape[:axis], points - 2 * n, *y.shape[axis + 1 :]]
        y = torch.cat((low, y.new_zeros(between), high), axis)
    # Zeros fill the last axis.
    return torch.fft.irfftn(y, s=size, dim=tuple(range(2, y.dim())), norm="forward")


def resized(x: torch.Tensor, size: Sizes) -> torch.Tensor:
    """The field with another number of points: its spectrum is cut or padded."""
    old = tuple(x.shape[2:])
    return of_spectrum(spectrum(x, tuple(min(n) // 2 for n in zip(old, size, strict=True))), size)


class Spectral(nn.Module):
    """A product for each of the low frequencies of a field, which may get another size."""

    def __init__(self, inner: int, outer: int, modes: Sizes) -> None:
        super().__init__()
        self.modes = modes
        shape = inner, outer, *(2 * n for n in modes[:-1]), modes[-1], 2
        self.weights = nn.Parameter(torch.randn(shape) / inner)

    def forward(self, x: torch.Tensor, size: Sizes | None = None) -> torch.Tensor:
        weights = torch.view_as_complex(self.weights)
        products = torch.einsum("bi...,io...->bo...", spectrum(x, self.modes), weights)
        return of_spectrum(products, size or tuple(x.shape[2:]))


class Projected(nn.Module):
    """Lifts the channels of a field, runs an operator on it, and projects the channels again."""

    def __init__(self, channels: int, widths: Sequence[int], operator: nn.Module) -> None:
        super().__init__()
        *lift, into, hidden = widths
        pairs = itertools.pairwise((channels, *lift))
        self.lift = nn.Sequential(*(nn.Linear(*pair) for pair in pairs))
        self.operator = operator
        self.project = nn.Sequential(nn.Linear(into, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.operator(self.lift(x).movedim(-1, 1)).movedim(1, -1))


class FourierLayer(nn.Module):
    """The Fourier layer of the neural operator (Li et al., 2021), with an MLP after the product."""

    def __init__(self, width: int, modes: Sizes) -> None:
        super().__init__()
        point = functools.partial(CONVOLUTIONS[len(modes)], width, width, 1)
        self.spectral, self.skip = Spectral(width, width, modes), point()
        self.mlp = nn.Sequential(point(), nn.GELU(), point())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.mlp(self.spectral(x)) + self.skip(x))


class SmallUNet(nn.Module):
    """The U-Net path of a U-Fourier layer: three halvings, and back with skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        strides = (2, 2, 1, 2, 1)
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm3d(width),
                nn.LeakyReLU(0.1),
            )
            for stride in strides
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose3d(n * width, width, 4, 2, 1), nn.LeakyReLU(0.1))
            for n in (1, 2, 2)
        )
        self.out = nn.Conv3d(2 * width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[2](self.down[1](first))
        y = self.up[0](self.down[4](self.down[3](second)))
        for up, skip in ((self.up[1], second), (self.up[2], first)):
            y = up(torch.cat((y, skip), dim=1))
        return self.out(torch.cat((y, x), dim=1))


class UFourierOperator(nn.Module):
    """U-FNO (Wen et al., 2022): three Fourier layers, then three with a U-Net each; the field is padded."""

    def __init__(self, width: int, modes: Sizes, padding: int = 8) -> None:
        super().__init__()
        self.padding = padding
        self.spectral = nn.ModuleList(Spectral(width, width, modes) for _ in range(6))
        self.point = nn.ModuleList(nn.Conv3d(width, width, 1) for _ in range(6))
        self.unets = nn.ModuleList(SmallUNet(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, self.padding, 0, self.padding))
        for k, (spectral, point) in enumerate(zip(self.spectral, self.point, strict=True)):
            y = spectral(x) + point(x)
            x = nn.functional.relu(y if k < 3 else y + self.unets[k - 3](x))
        return x[..., : -self.padding, : -self.padding]


class ResizedLayer(nn.Module):
    """A layer of UNO: both of its paths give the field another size."""

    def __init__(self, inner: int, outer: int, modes: Sizes, normed: bool) -> None:
        super().__init__()
        self.spectral, self.point = Spectral(inner, outer, modes), nn.Conv3d(inner, outer, 1)
        self.norm = nn.InstanceNorm3d(outer, affine=True) if normed else nn.Identity()

    def forward(self, x: torch.Tensor, size: Sizes) -> torch.Tensor:
        return nn.functional.gelu(self.norm(self.spectral(x, size) + resized(self.point(x), size)))


class UOperator(nn.Module):
    """UNO (Rahman et al., 2023): the field shrinks and its channels grow, and back with skips; time grows fourfold."""

    #: Growth of the channels, then of the two axes of space and of time.
    LAYERS = (
        (2, 0.75, 1.0),
        (4, 0.5, 1.0),
        (8, 0.25, 1.6),
        (16, 0.125, 1.6),
        (4, 0.5, 2.4),
        (2, 0.75, 3.2),
        (2, 1.0, 4.0),
    )
    #: Of the seven layers, those whose input is joined by the result of an earlier one.
    SKIPS: Mapping[int, int] = {5: 1, 6: 0}

    def __init__(self, width: int, modes: Sequence[Sizes]) -> None:
        super().__init__()
        inner, layers, outers = width, [], []
        for k, ((growth, *_), of_layer) in enumerate(zip(self.LAYERS, modes, strict=True)):
            inner += outers[self.SKIPS[k]] if k in self.SKIPS else 0
            layers.append(ResizedLayer(inner, growth * width, of_layer, k in (0, 3, 5)))
            inner = growth * width
            outers.append(inner)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = []
        y = x
        for k, (layer, (_, space, time)) in enumerate(zip(self.layers, self.LAYERS, strict=True)):
            if k in self.SKIPS:
                skip = resized(results[self.SKIPS[k]], tuple(y.shape[2:]))
                y = torch.cat((y, skip), dim=1)
            *plane, steps = x.shape[2:]
            y = layer(y, (*(int(n * space) for n in plane), int(steps * time)))
            results.append(y)
        return torch.cat((y, resized(x, tuple(y.shape[2:]))), dim=1)


def field(inputs: Sizes, outputs: Sizes) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(inputs), "y": torch.rand(outputs)}


def unet(batch: int, side: int, width: int) -> Workload:
    return Workload(
        about=f"width {width} to {16 * width}, batch {batch} of {side} by {side}",
        model=lambda: Regression(UNet(width)),
        batch=field((batch, 3, side, side), (batch, 1, side, side)),
    )


def mixer(batch: int, side: int, width: int, depth: int) -> Workload:
    return Workload(
        about=f"{depth} layers of width {width}, patches of 16, batch {batch} of {side} by {side}",
        model=lambda: Classifier(Mixer(side, width=width, depth=depth)),
        batch=lambda: {
            "x": torch.randn(batch, 3, side, side),
            "labels": torch.randint(0, 1000, (batch,)),
        },
    )


def transformer(batch: int, length: int, width: int, layers: int) -> Workload:
    shape = (length, batch, width)
    return Workload(
        about=f"{layers} and {layers} layers of width {width}, batch {batch}, sequences of {length}",
        model=lambda: EncoderDecoder(layers, width),
        batch=lambda: dict(zip(("source", "target", "y"), torch.randn(3, *shape), strict=True)),
        draws=True,
    )


def fno(batch: int, sides: Sizes, width: int, modes: Sizes) -> Workload:
    def model() -> nn.Module:
        layers = (FourierLayer(width, modes) for _ in range(4))
        return Regression(
            Projected(len(sides) + 1, (width, width, 2 * width), nn.Sequential(*layers))
        )

    return Workload(
        about=f"4 layers of width {width}, batch {batch} of {' by '.join(map(str, sides))}",
        model=model,
        batch=field((batch, *sides, len(sides) + 1), (batch, *sides, 1)),
    )


def ufno(batch: int, sides: Sizes, width: int, modes: Sizes) -> Workload:
    def model() -> nn.Module:
        return Regression(Projected(12, (width, width, 128), UFourierOperator(width, modes)))

    return Workload(
        about=f"6 layers of width {width}, batch {batch} of {' by '.join(map(str, sides))}",
        model=model,
        batch=field((batch, *sides, 12), (batch, *sides, 1)),
    )


def uno(batch: int, sides: Sizes, width: int, modes: Sequence[Sizes]) -> Workload:
    def model() -> nn.Module:
        widths = (width // 2, width, 3 * width, 4 * width)
        return Regression(Projected(6, widths, UOperator(width, modes)))

    return Workload(
        about=f"7 layers of width {width} to {16 * width}, batch {batch} of {' by '.join(map(str, sides))}",
        model=model,
        batch=field((batch, *sides, 6), (batch, *sides[:2], 4 * sides[2], 1)),
    )


NETWORKS: Mapping[str, Workload] = {
    "GPT2": text(
        "gpt2", 8, 512, "24 layers of width 1024, dropout", vocab_size=50257, n_embd=1024, n_layer=24, n_head=16,
        draws=True,
    ),
    "UNet": unet(50, 256, 32),
    "MLP-Mixer": mixer(100, 256, 512, 12),
    "RegNet32": images(
        "regnet", 23, 256, "RegNetX-32GF", embedding_size=32, hidden_sizes=[336, 672, 1344, 2520],
        depths=[2, 7, 13, 1], groups_width=168, layer_type="x", num_labels=1000,
    ),
    "ResNet101": images("resnet", 64, 256, "bottlenecks 3+4+23+3", depths=[3, 4, 23, 3], num_labels=1000),
    "Transformer": transformer(32, 200, 512, 6),
    "FNO": fno(4400, (256,), 64, (16,)),
    "U-FNO": ufno(3, (96, 200, 24), 36, (10, 10, 10)),
    "UNO": uno(
        16, (64, 64, 12), 8,
        [(20, 20, 4), (14, 14, 4), (6, 6, 4), (4, 4, 7), (4, 4, 7), (14, 14, 10), (20, 20, 14)],
    ),
}  # fmt: skip

#: Small ones of three kinds, whose steps run.
SMALL: Mapping[str, Workload] = {
    "UNet": unet(4, 32, 8),
    "FNO": fno(4, (32, 32), 16, (4, 4)),
    "UNO": uno(
        1, (32, 32, 6), 4,
        [(4, 4, 3), (4, 4, 3), (4, 4, 3), (2, 2, 4), (2, 2, 4), (4, 4, 6), (8, 8, 8)],
    ),
}  # fmt: skip
