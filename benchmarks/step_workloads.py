"""What `benchmarks/step.py` trains: eight small models on the CPU, a Llama of 1.1 billion parameters on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


class WithLoss(nn.Module):
    """A `transformers` model that returns its loss alone, so that no other output is kept alive."""

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
        name: what tables call it.
        about: its sizes, for people.
        device: where it trains.
        dtype: of its parameters.
        model: builds it.
        batch: draws one batch.
        rate: learning rate of plain SGD.
        draws: whether it draws random numbers: compiled steps draw others than eager PyTorch's, all the same.
    """

    name: str
    about: str
    device: str
    dtype: torch.dtype
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    rate: float = 0.01
    draws: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return WithLoss(self.model()).to(device=self.device, dtype=self.dtype).train()

    def batches(self, count: int) -> list[Batch]:
        torch.manual_seed(1)
        drawn = [self.batch() for _ in range(count)]
        return [{k: v.to(self.device) for k, v in b.items()} for b in drawn]


def llama(device: str, *, batch: int, seq: int, dtype: torch.dtype, **sizes: int) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(use_cache=False, max_position_embeddings=seq, **sizes)

    def draw() -> Batch:
        ids = torch.randint(0, config.vocab_size, (batch, seq))
        return {"input_ids": ids, "labels": ids}

    about = ", ".join(f"{k} {v}" for k, v in sizes.items())
    return Workload(
        name="llama",
        about=f"{about}, batch {batch}, sequence {seq}",
        device=device,
        dtype=dtype,
        model=lambda: LlamaForCausalLM(config),
        batch=draw,
    )


def small_llama() -> Workload:
    return llama(
        "cpu",
        batch=4,
        seq=256,
        dtype=torch.float32,
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def small_resnet() -> Workload:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=100,
        problem_type="single_label_classification",  # else the first step notes it: one more compile
    )

    def draw() -> Batch:
        return {"pixel_values": torch.randn(16, 3, 96, 96), "labels": torch.randint(0, 100, (16,))}

    return Workload(
        name="resnet",
        about="basic blocks 2+2+2+2 of width 32 to 256, batch 16 of 96 by 96",
        device="cpu",
        dtype=torch.float32,
        model=lambda: ResNetForImageClassification(config),
        batch=draw,
        rate=0.001,  # at 0.01 a change of 1e-7 in the weights moves the loss by 1e-2 in ten steps
    )


def transformer(
    name: str, about: str, model: Callable[[], nn.Module], batch: Callable[[], Batch]
) -> Workload:
    """A small one on the CPU; without dropout, so that losses can be compared."""
    return Workload(
        name=name, about=about, device="cpu", dtype=torch.float32, model=model, batch=batch
    )


def long_gpt2() -> Workload:
    """A long sequence: attention takes most of the step, and is dear to run again."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=512, n_positions=2048, n_embd=256, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip

    def build() -> nn.Module:
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # else the first step logs it, which ends the graph
        return model

    def draw() -> Batch:
        ids = torch.randint(0, config.vocab_size, (1, 2048))
        return {"input_ids": ids, "labels": ids}

    return transformer(
        "gpt2-long",
        "2 layers of width 256, batch 1, sequence 2048",
        build,
        draw,
    )


def bert(dropout: float = 0.0) -> Workload:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip

    def draw() -> Batch:
        ids = torch.randint(0, config.vocab_size, (4, 256))
        return {"input_ids": ids, "labels": ids}

    about = "3 layers of width 256, batch 4, sequence 256"
    made = transformer("bert", about, lambda: BertForMaskedLM(config), draw)
    if not dropout:
        return made
    return replace(
        made, name="bert-dropout", about=f"{about}, dropout of {dropout:.0%}", draws=True
    )


def t5() -> Workload:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip

    def draw() -> Batch:
        ids = torch.randint(1, config.vocab_size, (4, 192))
        return {"input_ids": ids, "labels": ids}

    return transformer(
        "t5",
        "2 and 2 layers of width 256, batch 4, sequence 192",
        lambda: T5ForConditionalGeneration(config),
        draw,
    )


def vit() -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768, image_size=112,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=100,
        problem_type="single_label_classification",
    )  # fmt: skip

    def draw() -> Batch:
        return {"pixel_values": torch.randn(6, 3, 112, 112), "labels": torch.randint(0, 100, (6,))}

    return transformer(
        "vit",
        "4 layers of width 192, batch 6, 196 patches",
        lambda: ViTForImageClassification(config),
        draw,
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


def wide() -> Workload:
    def draw() -> Batch:
        return {"x": torch.randn(128, 1024), "labels": torch.randint(0, 1024, (128,))}

    return transformer("wide", "6 layers of 1024 to 4096 to 1024, batch 128", Wide, draw)


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


def unet() -> Workload:
    def draw() -> Batch:
        return {"x": torch.randn(4, 3, 48, 48)}

    return transformer(
        "unet", "two levels of width 64 and 128, batch 4 of 48 by 48", Convolutions, draw
    )


def large_llama() -> Workload:
    """1.1 billion parameters: the sizes of Llama 3.2 1B with a smaller vocabulary."""
    return llama(
        "cuda",
        batch=4,
        seq=2048,
        dtype=torch.bfloat16,
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


CPU: Mapping[str, Callable[[], Workload]] = {
    "llama": small_llama,
    "resnet": small_resnet,
    "gpt2-long": long_gpt2,
    "wide": wide,
    "unet": unet,
    "vit": vit,
    "bert": bert,
    "bert-dropout": lambda: bert(0.1),
    "t5": t5,
}
CUDA: Mapping[str, Callable[[], Workload]] = {"llama": large_llama}
