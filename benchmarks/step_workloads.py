"""What `benchmarks/step.py` trains: small models on the CPU, a Llama of 1.1 billion parameters on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


class WithLoss(nn.Module):
    """A `transformers` model that returns its loss alone, so that no other output is kept alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]


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
    """

    name: str
    about: str
    device: str
    dtype: torch.dtype
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    rate: float = 0.01

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


CPU: Mapping[str, Callable[[], Workload]] = {"llama": small_llama, "resnet": small_resnet}
CUDA: Mapping[str, Callable[[], Workload]] = {"llama": large_llama}
