"""Published architectures at their real sizes, without their weights, for capturing.

Everything lies on the meta device: nothing is allocated, nothing is fetched. Each builder returns
``(model, args, kwargs)``, so it is a MODEL on the command line too::

    remat capture tests/architectures.py:llama_7b -o llama-7b.json
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from remat.cli.hf import build

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _transformers(
    kind: str, config: str, *, batch: int, seq: int | None = None
) -> Callable[[], Call]:
    """A builder of a `transformers` model in bfloat16 and train mode, with its loss."""

    def call() -> Call:
        made = build(kind, [*config.split(), "dtype=bfloat16"], batch=batch, seq=seq)
        return made.model, tuple(made.args), dict(made.kwargs)

    return call


llama_7b = _transformers("llama", "", batch=1, seq=2048)  # the sizes are the config's defaults

llama_70b = _transformers(
    "llama",
    "hidden_size=8192 intermediate_size=28672 num_hidden_layers=80 num_attention_heads=64 "
    "num_key_value_heads=8 max_position_embeddings=4096",
    batch=1,
    seq=4096,
)

llama_8b = _transformers(
    "llama",
    "hidden_size=4096 intermediate_size=14336 num_hidden_layers=32 num_attention_heads=32 "
    "num_key_value_heads=8 vocab_size=128256 max_position_embeddings=8192",
    batch=1,
    seq=8192,
)

#: Qwen3-30B-A3B: 128 experts, of which eight take part in each token.
qwen3_moe = _transformers(
    "qwen3_moe",
    "hidden_size=2048 moe_intermediate_size=768 num_hidden_layers=48 num_attention_heads=32 "
    "num_key_value_heads=4 head_dim=128 num_experts=128 num_experts_per_tok=8 vocab_size=151936",
    batch=4,
    seq=4096,
)

gpt2_xl = _transformers("gpt2", "n_layer=48 n_embd=1600 n_head=25", batch=4, seq=1024)

bert_large = _transformers(
    "bert",
    "num_hidden_layers=24 hidden_size=1024 num_attention_heads=16 intermediate_size=4096",
    batch=32,
    seq=512,
)

t5_large = _transformers(
    "t5",
    "num_layers=24 num_decoder_layers=24 d_model=1024 d_ff=4096 num_heads=16",
    batch=8,
    seq=512,
)

vit_huge = _transformers(
    "vit",
    "num_hidden_layers=32 hidden_size=1280 num_attention_heads=16 intermediate_size=5120 "
    "patch_size=14 num_labels=1000 hidden_dropout_prob=0.1",
    batch=64,
)

mixtral_8x7b = _transformers("mixtral", "", batch=1, seq=4096)

#: Soft-capped logits, and a sliding window in every second layer.
gemma2_9b = _transformers(
    "gemma2",
    "hidden_size=3584 intermediate_size=14336 num_hidden_layers=42 num_attention_heads=16 "
    "num_key_value_heads=8",
    batch=1,
    seq=4096,
)

#: Selective state spaces; the scan over the sequence is associative, level by level.
mamba_130m = _transformers("mamba", "num_hidden_layers=24", batch=4, seq=1024)

mamba2_370m = _transformers(
    "mamba2", "num_hidden_layers=48 hidden_size=1024 num_heads=32 n_groups=1", batch=4, seq=2048
)

whisper_medium = _transformers(
    "whisper",
    "encoder_layers=24 decoder_layers=24 d_model=1024 encoder_attention_heads=16 "
    "decoder_attention_heads=16 encoder_ffn_dim=4096 decoder_ffn_dim=4096 dropout=0.1",
    batch=16,
    seq=448,
)

resnet_50 = _transformers("resnet", "num_labels=1000", batch=128)

resnet_101 = _transformers("resnet", "num_labels=1000 depths=[3,4,23,3]", batch=128)

#: Attention in shifted windows, and whole paths dropped at random.
swin_base = _transformers(
    "swin",
    "embed_dim=128 depths=[2,2,18,2] num_heads=[4,8,16,32] num_labels=1000",
    batch=64,
)


class _Conv(nn.Module):
    """A residual block of a diffusion U-Net, with the time embedding added in its middle."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outer))
        self.second = nn.Sequential(
            nn.GroupNorm(32, outer),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Conv2d(outer, outer, 3, padding=1),
        )
        self.skip = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(h)


class _Attention(nn.Module):
    """Attention over another sequence, or over its own."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context, width, bias=False)
        self.value = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.query(x), self.key(context), self.value(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Transformer(nn.Module):
    """Self-attention, cross-attention to the text, and a gated linear unit, over the pixels."""

    def __init__(self, width: int, context: int, heads: int = 8) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = _Attention(width, width, heads)
        self.cross = _Attention(width, context, heads)
        self.gated, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        h = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        y = self.norms[0](h)
        h = h + self.own(y, y)
        h = h + self.cross(self.norms[1](h), text)
        value, gate = self.gated(self.norms[2](h)).chunk(2, dim=-1)
        h = h + self.down(value * F.gelu(gate))
        return x + self.leave(h.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """The U-Net of latent diffusion in the sizes of Stable Diffusion 1: 860 million parameters.

    Source: Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022.
    """

    def __init__(
        self,
        base: int = 320,
        context: int = 768,
        blocks: int = 2,
        factors: tuple[int, ...] = (1, 2, 4, 4),
        attentions: tuple[int, ...] = (1, 1, 1, 0),
    ) -> None:
        """Build the layers.

        Args:
            attentions: numbers of transformers in each block of a level; the middle has as many as the
                deepest level with any.
        """
        super().__init__()
        widths, time = [base * factor for factor in factors], 4 * base
        self.time = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, base, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, skips = base, [base]
        for level, to in enumerate(widths):
            for _ in range(blocks):
                self.down.append(self._block(width, to, time, context, attentions[level]))
                width = to
                skips.append(width)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        deepest = [n for n in attentions if n][-1]
        self.middle = self._block(width, width, time, context, deepest)
        self.last = _Conv(width, width, time)
        for level, to in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(
                    self._block(width + skips.pop(), to, time, context, attentions[level])
                )
                width = to
            if level > 0:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.leave = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1)
        )

    @staticmethod
    def _block(inner: int, outer: int, time: int, context: int, attentions: int) -> nn.ModuleList:
        attention = (_Transformer(outer, context) for _ in range(attentions))
        return nn.ModuleList([_Conv(inner, outer, time), *attention])

    @staticmethod
    def _run(
        block: nn.Module, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        convolution, *attention = block.children()
        x = convolution(x, time)
        for part in attention:
            x = part(x, text)
        return x

    def forward(
        self, noisy: torch.Tensor, time: torch.Tensor, text: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """The loss: how far the predicted noise is from the noise.

        Args:
            noisy: latents, (batch, 4, height, width).
            time: sinusoids of the time step, (batch, base).
            text: the encoded prompt, (batch, tokens, context).
            noise: what was added to the latents, of their shape.
        """
        time = self.time(time)
        x = self.enter(noisy)
        kept = [x]
        for block in self.down:
            is_block = isinstance(block, nn.ModuleList)
            x = self._run(block, x, time, text) if is_block else block(x)
            kept.append(x)
        x = self.last(self._run(self.middle, x, time, text), time)
        for block in self.up:
            if isinstance(block, nn.ModuleList):
                x = self._run(block, torch.cat([x, kept.pop()], dim=1), time, text)
            else:
                x = block(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.leave(x).float(), noise.float())


def unet() -> Call:
    with torch.device("meta"):
        model = UNet().to(torch.bfloat16).train()
        latents = torch.zeros(8, 4, 64, 64, dtype=torch.bfloat16)
        time = torch.zeros(8, 320, dtype=torch.bfloat16)
        text = torch.zeros(8, 77, 768, dtype=torch.bfloat16)
    return model, (latents, time, text, latents.clone()), {}


def sdxl() -> Call:
    """The sizes of Stable Diffusion XL: ten transformers in each block of its deepest level."""
    with torch.device("meta"):
        model = UNet(context=2048, factors=(1, 2, 4), attentions=(0, 2, 10))
        latents, time, text = (
            torch.zeros(2, *shape, dtype=torch.bfloat16)
            for shape in ((4, 128, 128), (320,), (77, 2048))
        )
    return model.to(torch.bfloat16).train(), (latents, time, text, latents.clone()), {}


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: the condition scales and shifts both norms, and gates both branches."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift, gate, *of_mlp = self.condition(condition)[:, None].chunk(6, -1)
        x = x + gate * self.out(
            attend(self.attention(self.norms[0](x) * (1 + scale) + shift), self.heads)
        )
        return x + of_mlp[2] * self.mlp(self.norms[1](x) * (1 + of_mlp[0]) + of_mlp[1])


def attend(projected: torch.Tensor, heads: int, *, causal: bool = False) -> torch.Tensor:
    """Attention over queries, keys and values that lie beside each other: (batch, length, 3 * width)."""
    batch, length, width = projected.shape
    parts = projected.view(batch, length, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    found = F.scaled_dot_product_attention(*parts, is_causal=causal)
    return found.transpose(1, 2).reshape(batch, length, width // 3)


class DiffusionTransformer(nn.Module):
    """A diffusion transformer on latents of 4 channels."""

    def __init__(self, width: int = 256, layers: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        tokens, condition = self.patches(x).flatten(2).transpose(1, 2), self.time(time)
        for block in self.blocks:
            tokens = block(tokens, condition)
        return self.out(tokens).square().mean()


def dit_xl() -> Call:
    """The sizes of DiT-XL/2: 28 layers of width 1152."""
    with torch.device("meta"):
        model = DiffusionTransformer(width=1152, layers=28, heads=16)
        x, time = torch.zeros(64, 4, 32, 32), torch.zeros(64, 64)
    return model.to(torch.bfloat16).train(), (x.bfloat16(), time.bfloat16()), {}


def _normed(inner: int, outer: int, size: int) -> tuple[nn.Module, ...]:
    """A convolution behind a norm and a rectifier."""
    convolution = nn.Conv2d(inner, outer, size, padding=size // 2, bias=False)
    return nn.BatchNorm2d(inner), nn.ReLU(), convolution


class DenseNet(nn.Module):
    """DenseNet-201: every layer reads what all before it in its block made.

    Source: Huang et al., "Densely Connected Convolutional Networks", 2017.
    """

    def __init__(self, growth: int = 32, layers: tuple[int, ...] = (6, 12, 48, 32)) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for number, count in enumerate(layers):
            block = nn.ModuleList()
            for _ in range(count):
                narrow = (*_normed(width, 4 * growth, 1), *_normed(4 * growth, growth, 3))
                block.append(nn.Sequential(*narrow))
                width += growth
            self.blocks.append(block)
            if number < len(layers) - 1:
                pooled = (*_normed(width, width // 2, 1), nn.AvgPool2d(2))
                self.transitions.append(nn.Sequential(*pooled))
                width //= 2
        self.norm = nn.BatchNorm2d(width)
        self.classes = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for number, block in enumerate(self.blocks):
            parts = [x]
            for layer in block:
                parts.append(layer(torch.cat(parts, dim=1)))
            x = torch.cat(parts, dim=1)
            if number < len(self.transitions):
                x = self.transitions[number](x)
        x = F.relu(self.norm(x)).mean(dim=(2, 3))
        return F.cross_entropy(self.classes(x).float(), labels)


def densenet_201() -> Call:
    with torch.device("meta"):
        model = DenseNet().to(torch.bfloat16).train()
        images = torch.zeros(64, 3, 224, 224, dtype=torch.bfloat16)
        labels = torch.zeros(64, dtype=torch.long)
    return model, (images, labels), {}


class RandomSkips(nn.Module):
    """A deep network in which every layer reads some earlier layers, drawn from a seed.

    Layers differ in width and in kind, so that neither the chain nor the repetition of an ordinary
    network helps a solver.
    """

    def __init__(self, layers: int = 200, width: int = 2048, seed: int = 0) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.sources: list[list[int]] = []
        self.layers = nn.ModuleList()
        for i in range(layers):
            far = draw.sample(range(i), min(i, draw.randrange(3)))
            self.sources.append(sorted({i, *far}))
            inner = width // 4 * draw.randint(1, 16)
            act = draw.choice([nn.GELU, nn.SiLU, nn.Tanh])
            self.layers.append(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, inner),
                    act(),
                    nn.Dropout(draw.choice([0.0, 0.1])),
                    nn.Linear(inner, width),
                )
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for layer, sources in zip(self.layers, self.sources, strict=True):
            read = values[sources[0]]
            for i in sources[1:]:
                read = read + values[i]
            values.append(values[-1] + layer(read))
        return values[-1].float().square().mean()


def random_skips() -> Call:
    with torch.device("meta"):
        model = RandomSkips().to(torch.bfloat16).train()
        x = torch.zeros(8192, 2048, dtype=torch.bfloat16)
    return model, (x,), {}


#: Every architecture, by the name of its instance.
ARCHITECTURES: Mapping[str, Callable[[], Call]] = {
    "llama-7b": llama_7b,
    "llama-70b": llama_70b,
    "gpt2-xl": gpt2_xl,
    "bert-large": bert_large,
    "t5-large": t5_large,
    "vit-huge": vit_huge,
    "mixtral-8x7b": mixtral_8x7b,
    "gemma2-9b": gemma2_9b,
    "mamba-130m": mamba_130m,
    "mamba2-370m": mamba2_370m,
    "whisper-medium": whisper_medium,
    "resnet-50": resnet_50,
    "resnet-101": resnet_101,
    "swin-base": swin_base,
    "densenet-201": densenet_201,
    "unet": unet,
    "random-skips": random_skips,
}

#: Further architectures, of which no graph is kept as a file.
MORE_ARCHITECTURES: Mapping[str, Callable[[], Call]] = {
    "llama-8b": llama_8b,
    "qwen3-moe": qwen3_moe,
    "dit-xl": dit_xl,
    "sdxl": sdxl,
}
