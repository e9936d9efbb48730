"""The models of the benchmarks.

Models that the tests train as well are in `tests`: the small zoo (`tests.models`), published architectures at real size
(`tests.architectures`), and model types of `transformers` (`tests.model_types`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import remat
from tests.architectures import ARCHITECTURES, MORE_ARCHITECTURES, DiffusionTransformer, attend
from tests.architectures import UNet as DiffusionUNet
from tests.models import ZOO, Step
from tests.models import build as build_small

Batch = dict[str, torch.Tensor]

#: Classes of `transformers`, by what the benchmarks call them.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "resnet": "ResNetForImageClassification",
    "regnet": "RegNetForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "swin": "SwinForImageClassification",
    "deberta": "DebertaV2ForMaskedLM",
}


class WithLoss(nn.Module):
    """A model that returns its loss alone, so that no other output is kept alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        out = self.model(**batch)
        return out if isinstance(out, torch.Tensor) else out.loss  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and what it trains on.

    Attributes:
        about: its sizes, for people.
        model: builds it.
        batch: draws one batch.
        rate: learning rate of plain SGD.
        draws: whether it draws random numbers: compiled steps draw others than eager PyTorch's.
    """

    about: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    rate: float = 0.01
    draws: bool = False

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):  # large models are never on the host
            model = WithLoss(self.model())
        return model.to(device=device, dtype=dtype).train()

    def batches(
        self, count: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> list[Batch]:
        torch.manual_seed(1)
        return [
            {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in b.items()}
            for b in (self.batch() for _ in range(count))
        ]


def of_transformers(kind: str, **config: Any) -> nn.Module:
    """A randomly initialised model of `transformers`."""
    import transformers

    model = getattr(transformers, CLASSES[kind])
    made: nn.Module = model(model.config_class(**config))
    if kind == "gpt2":
        made.loss_type = "ForCausalLM"  # type: ignore[assignment] # else the first step logs: a graph break
    return made


def text(
    kind: str,
    batch: int,
    seq: int,
    about: str = "",
    *,
    least: int = 0,
    draws: bool = False,
    **config: Any,
) -> Workload:
    """A language model; ``least`` is the smallest token that is drawn."""
    if kind != "bert":
        config.setdefault("use_cache", False)

    def draw() -> Batch:
        ids = torch.randint(least, config["vocab_size"], (batch, seq))
        return {"input_ids": ids, "labels": ids}

    return Workload(
        about=f"{about}, batch {batch}, sequence {seq}",
        model=functools.partial(of_transformers, kind, **config),
        batch=draw,
        draws=draws,
    )


def images(
    kind: str, batch: int, side: int, about: str, *, rate: float = 0.01, **config: Any
) -> Workload:
    """A classifier of images."""
    # Without a type, the first step notes one, and the second compiles anew.
    config["problem_type"] = "single_label_classification"
    if kind in ("vit", "swin"):
        config["image_size"] = side

    def draw() -> Batch:
        labels = torch.randint(0, config["num_labels"], (batch,))
        return {"pixel_values": torch.randn(batch, 3, side, side), "labels": labels}

    return Workload(
        about=f"{about}, batch {batch} of {side} by {side}",
        model=functools.partial(of_transformers, kind, **config),
        batch=draw,
        rate=rate,
    )


class Wide(nn.Module):
    """Wide layers on few rows: products take nearly all of the step."""

    def __init__(self, width: int = 1024, layers: int = 6) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for k, up in enumerate(self.up):
            x = x + self.down[k](nn.functional.gelu(up(nn.functional.layer_norm(x, x.shape[-1:]))))
        return nn.functional.cross_entropy(x, labels)


class Convolutions(nn.Module):
    """Two levels of a diffusion model's UNet: convolutions, group norms, a skip across."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self._block(width, width) for _ in range(2))
        self.halved = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.deep = nn.ModuleList(self._block(2 * width, 2 * width) for _ in range(2))
        self.up = nn.ModuleList((self._block(3 * width, width), self._block(width, width)))
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def _block(ins: int, outs: int) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(8, ins), nn.SiLU(), nn.Conv2d(ins, outs, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.down:
            h = h + block(h)
        deep = self.halved(h)
        for block in self.deep:
            deep = deep + block(deep)
        h = torch.cat((nn.functional.interpolate(deep, scale_factor=2.0), h), dim=1)
        for block in self.up:
            h = block(h)
        return (self.out(h) - x).square().mean()


class ExpertsBlock(nn.Module):
    """Causal attention, and a sum of experts of which the router weighs two."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attend(self.attention(self.norms[0](x)), 4, causal=True))
        y = self.norms[1](x)
        weights = self.router(y).softmax(-1)
        weights = torch.where(weights >= weights.topk(2, -1)[0][..., -1:], weights, 0.0)
        return x + sum(weights[..., k, None] * e(y) for k, e in enumerate(self.experts))


class MixtureOfExperts(nn.Module):
    """A language model of blocks with experts."""

    def __init__(self, width: int = 192, layers: int = 4, experts: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(ExpertsBlock(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


class GatedUnits(nn.Module):
    """A language model of one recurrent cell, unrolled."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, width)
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 500)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        states = [torch.zeros_like(x[:, 0])]
        for t in range(x.shape[1]):
            states.append(self.cell(x[:, t], states[-1]))
        logits = self.head(torch.stack(states[1:], 1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def _bert(dropout: float) -> Workload:
    about = "3 layers of width 256" + (f", dropout of {dropout:.0%}" if dropout else "")
    return text(
        "bert", 4, 256, about, draws=dropout > 0, vocab_size=512, hidden_size=256, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=1024, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip


#: Small models, whose steps are timed on a CPU; without dropout, so that losses can be compared, but for one.
STEPS: Mapping[str, Workload] = {
    "llama": text(
        "llama", 4, 256, "4 layers of width 256", vocab_size=1024, hidden_size=256, intermediate_size=704,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    ),
    "resnet": images(
        "resnet", 16, 96, "basic blocks 2+2+2+2 of width 32 to 256", embedding_size=32, num_labels=100,
        hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic",
        rate=0.001,  # at 0.01 a change of 1e-7 in the weights moves the loss by 1e-2 in ten steps
    ),
    # Attention takes most of the step, and is dear to run again.
    "gpt2-long": text(
        "gpt2", 1, 2048, "2 layers of width 256", vocab_size=512, n_positions=2048, n_embd=256, n_layer=2,
        n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "wide": Workload(
        about="6 layers of 1024 to 4096 to 1024, batch 128",
        model=Wide,
        batch=lambda: {"x": torch.randn(128, 1024), "labels": torch.randint(0, 1024, (128,))},
    ),
    "unet": Workload(
        about="two levels of width 64 and 128, batch 4 of 48 by 48",
        model=Convolutions,
        batch=lambda: {"x": torch.randn(4, 3, 48, 48)},
    ),
    "vit": images(
        "vit", 6, 112, "4 layers of width 192", hidden_size=192, num_hidden_layers=4, num_attention_heads=3,
        intermediate_size=768, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=100,
    ),
    "bert": _bert(0.0),
    "bert-dropout": _bert(0.1),
    "t5": text(
        "t5", 4, 192, "2 and 2 layers of width 256", least=1, vocab_size=512, d_model=256, d_kv=64, d_ff=1024,
        num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
    ),
}  # fmt: skip

#: Models whose compilation is timed: those and two more.
COMPILED: Mapping[str, Workload] = {
    **STEPS,
    "dit": Workload(
        about="a diffusion transformer, 6 layers of width 256, batch 8 of 32 by 32",
        model=DiffusionTransformer,
        batch=lambda: {"x": torch.randn(8, 4, 32, 32), "time": torch.randn(8, 64)},
    ),
    "moe": Workload(
        about="4 layers of width 192 with 6 experts each, batch 4, sequence 128",
        model=MixtureOfExperts,
        batch=lambda: {"input_ids": torch.randint(0, 1000, (4, 128))},
    ),
}

#: Models that are compiled without a budget: most of those whose compilation is timed, and other kinds of layers.
WITHOUT_BUDGET: Mapping[str, Workload] = {
    **{name: work for name, work in COMPILED.items() if name not in ("wide", "bert-dropout")},
    "convnext": images(
        "convnext", 8, 64, "2+2+4+2 blocks of width 48 to 384", hidden_sizes=[48, 96, 192, 384],
        depths=[2, 2, 4, 2], num_labels=100,
    ),
    "swin": images(
        "swin", 8, 64, "2+2 blocks of width 48 and 96", patch_size=4, embed_dim=48, depths=[2, 2], num_heads=[3, 6],
        window_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0, num_labels=100,
    ),
    "gru": Workload(
        about="a cell of width 128, batch 32, sequence 16",
        model=GatedUnits,
        batch=lambda: {"input_ids": torch.randint(0, 500, (32, 16))},
    ),
    "deberta": text(
        "deberta", 4, 128, "2 layers of width 192", least=1, vocab_size=512, hidden_size=192, num_hidden_layers=2,
        num_attention_heads=3, intermediate_size=768, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        relative_attention=True, pos_att_type=["c2p", "p2c"], max_position_embeddings=128,
    ),
}  # fmt: skip

#: Models of real width, for one accelerator: each trains in bfloat16 within 40 GiB or so, and compiles in half a minute.
LARGE: Mapping[str, Workload] = {
    # Half of the layers of Llama 3.2 1B, and a smaller vocabulary.
    "llama": text(
        "llama", 4, 2048, "8 layers of width 2048", vocab_size=32000, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2048,
    ),
    "gpt2": text(
        "gpt2", 8, 1024, "12 layers of width 1024", vocab_size=50257, n_layer=12, n_embd=1024, n_head=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "bert": text(
        "bert", 32, 512, "12 layers of width 1024", vocab_size=30522, num_hidden_layers=12, hidden_size=1024,
        num_attention_heads=16, intermediate_size=4096, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "vit": images(
        "vit", 64, 224, "12 layers of width 1024", hidden_size=1024, num_hidden_layers=12, num_attention_heads=16,
        intermediate_size=4096, patch_size=16, num_labels=1000,
    ),
    "resnet": images("resnet", 128, 224, "bottlenecks 3+4+6+3", num_labels=1000),
    "unet": Workload(
        about="sizes of Stable Diffusion 1, batch 8",
        model=DiffusionUNet,
        batch=lambda: {
            "noisy": torch.randn(8, 4, 64, 64),
            "time": torch.randn(8, 320),
            "text": torch.randn(8, 77, 768),
            "noise": torch.randn(8, 4, 64, 64),
        },
    ),
}  # fmt: skip


def llama_of(layers: int, width: int = 384) -> Workload:
    return text(
        "llama", 4, 256, f"{layers} layers of width {width}", vocab_size=512, hidden_size=width,
        intermediate_size=11 * width // 4, num_hidden_layers=layers, num_attention_heads=6,
    )  # fmt: skip


#: What the selective checkpointing of modules is measured on.
CHECKPOINTED: Mapping[str, Workload] = {
    "Llama": llama_of(4),
    "GPT-2 with dropout": text(
        "gpt2", 4, 256, "4 layers of width 384", vocab_size=512, n_embd=384, n_layer=4, n_head=6,
        bos_token_id=None, eos_token_id=None, draws=True,
    ),
    "ViT": images(
        "vit", 4, 128, "4 layers of width 384", hidden_size=384, intermediate_size=1056, num_hidden_layers=4,
        num_attention_heads=6, patch_size=8, num_labels=10, hidden_dropout_prob=0.1,
    ),
    "T5": text(
        "t5", 4, 192, "3 and 3 layers of width 384", vocab_size=512, d_model=384, d_kv=64, d_ff=1056,
        num_layers=3, num_heads=6, decoder_start_token_id=0, draws=True,
    ),
    "ResNet": images(
        "resnet", 16, 128, "2+2+2 blocks", embedding_size=32, hidden_sizes=[64, 128, 192], depths=[2, 2, 2],
        num_labels=10,
    ),
}  # fmt: skip

#: What whole steps, with an optimizer, are measured on: overrides of the configs of `transformers`.
FITTED: Mapping[str, str] = {
    "llama": "hidden_size=512 intermediate_size=1408 num_hidden_layers=4 num_attention_heads=8 "
    "num_key_value_heads=4 vocab_size=8000",
    "gpt2": "n_embd=512 n_layer=4 n_head=8 vocab_size=8000",
    "bert": "hidden_size=512 num_hidden_layers=4 num_attention_heads=8 intermediate_size=2048 vocab_size=8000",
    "t5": "d_model=512 d_ff=1024 num_layers=3 num_decoder_layers=3 vocab_size=8000",
    "vit": "hidden_size=384 num_hidden_layers=6 num_attention_heads=6 intermediate_size=1536",
    "resnet": "layer_type=basic depths=[2,2,2,2] hidden_sizes=[64,128,256,512]",
}

#: Models whose loss takes much memory, at real size; steps are captured in bfloat16.
VOCABULARIES: Mapping[str, Workload] = {
    "llama-32k": text(
        "llama", 16, 1024, vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4,
    ),
    "gpt2-50k": text("gpt2", 16, 1024, vocab_size=50257, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "qwen2-152k": text(
        "qwen2", 16, 1024, vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "gemma2-256k": text("gemma2", 16, 1024, vocab_size=256000, num_hidden_layers=26),
}  # fmt: skip

#: Small models with the vocabularies of two of them.
SMALL_VOCABULARIES: Mapping[str, Workload] = {
    "llama-32k": text(
        "llama", 4, 1024, vocab_size=32000, hidden_size=256, intermediate_size=704, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    ),
    "gpt2-50k": text(
        "gpt2", 4, 1024, vocab_size=50257, n_embd=256, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip

#: Steps of a Llama 7B and, in bfloat16, of a GPT-2 XL, with any number of layers.
LAYERED: Mapping[str, Callable[[int], Workload]] = {
    "llama": lambda n: text(
        "llama", 1, 2048, vocab_size=32000, num_hidden_layers=n, use_cache=True
    ),
    "gpt2": lambda n: text("gpt2", 2, 1024, vocab_size=50257, n_embd=1600, n_layer=n, n_head=25),
}


def step_of(name: str) -> tuple[Any, Any, Any]:
    """A model with the inputs of a step.

    At real size on the meta device: by its name, or ``llama-32`` with that many layers. Else a small one, ``NAME-small``.
    """
    if real := {**ARCHITECTURES, **MORE_ARCHITECTURES}.get(name):
        return real()
    if work := VOCABULARIES.get(name):
        return work.build("meta", torch.bfloat16), (), work.batches(1, "meta")[0]
    if layered := re.fullmatch(r"(llama|gpt2)-(\d+)(-layers)?", name):
        with torch.device("meta"):
            work = LAYERED[layered[1]](int(layered[2]))
            model = work.model().to(torch.bfloat16 if layered[1] == "gpt2" else torch.float32)
            return model.train(), (), work.batch()
    step: Step = build_small(name.removesuffix("-small"))
    return step.model, step.args, step.kwargs


#: Every name that `step_of` knows, the small ones first.
REAL_AND_SMALL = (*(f"{name}-small" for name in ZOO), *ARCHITECTURES)


@functools.lru_cache(maxsize=1)
def captured(name: str, lower: Any = "inductor") -> remat.JointGraph:
    """The joint graph of a step; the last one is kept, for the experiments that ask for it again."""
    return remat.capture(*step_of(name), lower=lower)
