"""Models to plan: ``remat plan examples/models.py:llama --budget peak:0.3``.

Each function returns ``(model, args, kwargs)``: what one call of a training step is given. The
weights lie on the meta device, so that planning takes no memory for them; `demo.py` asks for real
ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def llama(
    *,
    layers: int = 4,
    hidden: int = 256,
    batch: int = 4,
    seq: int = 256,
    device: str = "meta",
    seed: int = 0,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A Llama of `transformers` with its usual architecture in small, and a batch of tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=seq,
        use_cache=False,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(config).train()
        tokens = torch.randint(0, config.vocab_size, (batch, seq))
    return model, (), {"input_ids": tokens, "labels": tokens}


class Block(nn.Module):
    """A transformer block with dropout, in plain PyTorch."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def gpt() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A GPT with dropout in plain PyTorch: `transformers` is not needed."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(4096, 256),
            *(Block(256, heads=8, dropout=0.1) for _ in range(4)),
            nn.LayerNorm(256),
            nn.Linear(256, 4096),
        )
        tokens = torch.zeros(4, 256, dtype=torch.long)
    return model.train(), (tokens,), {}
