"""Model types of `transformers` in sizes that train in milliseconds, dropout on where there is any.

A recipe keeps what makes its type hard to plan: grouped and windowed attention, routed experts,
recurrences, encoders read by decoders, tied layers, relative positions, BatchNorm, dropped paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from remat.cli.hf import build
from remat.cli.hf_recipes import draw, recipe_for

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of one batch.

    Attributes:
        batch: how many examples.
        seq: tokens of each; images have none.
        side: pixels on a side, where the type takes images of any size; None: as its config says.
    """

    batch: int
    seq: int | None = None
    side: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model type.

    Attributes:
        config: overrides of its config, as on the command line.
        first: the size of the first batch, and of every one where shapes are static.
        second: the size of the second batch where shapes are dynamic.
    """

    config: str
    first: Size
    second: Size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Built:
    """A model of a type and what it trains on.

    Attributes:
        model: in train mode, with random weights.
        title: what it is, for people.
        same: two batches of one size.
        other: two batches of different sizes; the first is that of ``same``.
    """

    model: torch.nn.Module
    title: str
    same: tuple[Batch, Batch]
    other: tuple[Batch, Batch]


def make(name: str, seed: int = 0) -> Built:
    """Builds a model of a type; the same seed gives the same weights and batches."""
    recipe = RECIPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = build(
            name,
            recipe.config.split(),
            batch=recipe.first.batch,
            seq=recipe.first.seq,
            device="cpu",
        )
        kind, model = recipe_for(name), made.model

        def batch(size: Size) -> Batch:
            inputs = kind.inputs(model.config, size.batch, size.seq or 0, model.dtype)
            return _cropped(draw(inputs, model.config, "cpu"), size.side)

        first = batch(recipe.first)
        same, other = batch(recipe.first), batch(recipe.second)
    return Built(model=model, title=made.title, same=(first, same), other=(first, other))


def _cropped(batch: Batch, side: int | None) -> Batch:
    if side is not None:
        batch["pixel_values"] = batch["pixel_values"][..., :side, :side].contiguous()
    return batch


def _text(config: str) -> Recipe:
    return Recipe(config=config, first=Size(batch=4, seq=32), second=Size(batch=3, seq=40))


def _images(config: str, side: int | None = None) -> Recipe:
    """Images of 32 by 32 that come in other numbers; of another size too, where a side is given."""
    return Recipe(
        config=f"{config} num_labels=10 problem_type=single_label_classification",
        first=Size(batch=4, side=None if side is None else 32),
        second=Size(batch=6, side=side),
    )


_DECODER = (
    "vocab_size=99 hidden_size=64 num_hidden_layers=1 num_attention_heads=4 intermediate_size=96 "
    "max_position_embeddings=64"
)
_GROUPED = f"{_DECODER} num_key_value_heads=2 attention_dropout=0.1"
_TWO = _GROUPED.replace("layers=1", "layers=2")  # where layers are of two kinds in turn
_ENCODER = _DECODER
_PAIR = (
    "vocab_size=99 d_model=64 encoder_layers=1 decoder_layers=1 encoder_attention_heads=4 "
    "decoder_attention_heads=4 encoder_ffn_dim=96 decoder_ffn_dim=96 attention_dropout=0.1"
)
_T5 = "vocab_size=99 d_model=64 d_kv=16 d_ff=96 num_layers=1 num_decoder_layers=1 num_heads=4"
_PATCHES = (
    "hidden_size=64 num_hidden_layers=1 num_attention_heads=4 image_size=32 patch_size=4 "
    "hidden_dropout_prob=0.1 attention_probs_dropout_prob=0.1"
)

#: Every type, by its name in `transformers`.
RECIPES: Mapping[str, Recipe] = {
    # Decoders
    "llama": _text(_GROUPED),
    "mistral": _text(f"{_GROUPED} sliding_window=8"),
    "gemma2": _text(f"{_TWO} head_dim=16 sliding_window=8"),
    "phi3": _text(f"{_GROUPED} resid_pdrop=0.1 embd_pdrop=0.1 pad_token_id=0"),
    "gpt2": _text("vocab_size=99 n_embd=64 n_layer=1 n_head=4 n_positions=64"),
    "opt": _text(
        "vocab_size=99 hidden_size=64 word_embed_proj_dim=64 num_hidden_layers=1 "
        "num_attention_heads=4 ffn_dim=96 max_position_embeddings=64"
    ),
    "bloom": _text(
        "vocab_size=99 hidden_size=64 n_layer=1 n_head=4 hidden_dropout=0.1 attention_dropout=0.1"
    ),
    "falcon": _text(
        "vocab_size=99 hidden_size=64 num_hidden_layers=1 num_attention_heads=4 "
        "hidden_dropout=0.1 attention_dropout=0.1"
    ),
    # Experts
    "mixtral": _text(f"{_GROUPED} num_local_experts=4"),
    "qwen3_moe": _text(f"{_GROUPED} moe_intermediate_size=32 num_experts=4 num_experts_per_tok=2"),
    "deepseek_v3": _text(
        f"{_TWO} num_key_value_heads=4 moe_intermediate_size=32 n_routed_experts=4 "
        "num_experts_per_tok=2 n_group=2 topk_group=1 kv_lora_rank=16 q_lora_rank=24 "
        "qk_rope_head_dim=8 v_head_dim=16 qk_nope_head_dim=8 first_k_dense_replace=1"
    ),
    "gpt_oss": _text(f"{_TWO} head_dim=16 num_local_experts=4 sliding_window=8"),
    "switch_transformers": _text(
        f"{_T5} num_experts=4 num_sparse_encoder_layers=1 num_sparse_decoder_layers=1"
    ),
    # Recurrences
    "mamba": _text("vocab_size=99 hidden_size=64 num_hidden_layers=1 state_size=8"),
    "mamba2": _text(
        "vocab_size=99 hidden_size=64 num_hidden_layers=1 state_size=8 num_heads=8 head_dim=16 "
        "n_groups=1 chunk_size=8"
    ),
    "rwkv": Recipe(
        config="vocab_size=99 hidden_size=64 num_hidden_layers=2 attention_hidden_size=64 "
        "intermediate_size=96 context_length=64",
        first=Size(batch=6, seq=12),  # it is a loop over the sequence, unrolled
        second=Size(batch=5, seq=16),
    ),
    "recurrent_gemma": _text(
        "vocab_size=99 hidden_size=64 num_hidden_layers=3 num_attention_heads=4 "
        "num_key_value_heads=1 intermediate_size=96 lru_width=64 attention_window_size=8 "
        "attention_dropout=0.1"
    ),
    # Encoders
    "bert": _text(_ENCODER),
    # Its layers share their weights.
    "albert": _text(
        f"{_ENCODER.replace('layers=1', 'layers=2')} embedding_size=32 hidden_dropout_prob=0.1 "
        "attention_probs_dropout_prob=0.1"
    ),
    "deberta-v2": _text(f"{_ENCODER} relative_attention=true pos_att_type=['p2c','c2p']"),
    "modernbert": _text(
        f"{_ENCODER.replace('layers=1', 'layers=2')} pad_token_id=0 local_attention=8 "
        "mlp_dropout=0.1 attention_dropout=0.1 embedding_dropout=0.1"
    ),
    "longformer": _text(f"{_ENCODER} attention_window=[8]"),
    # Encoders with decoders
    "t5": _text(_T5),
    "bart": _text(f"{_PAIR} max_position_embeddings=64"),
    # Speech
    "whisper": _text(
        f"{_PAIR} max_source_positions=40 max_target_positions=64 num_mel_bins=16 pad_token_id=0 "
        "decoder_start_token_id=1 dropout=0.1"
    ),
    "wav2vec2": _text(
        "vocab_size=99 hidden_size=64 num_hidden_layers=1 num_attention_heads=4 "
        "intermediate_size=96 conv_dim=[32,32,32] conv_stride=[5,2,2] conv_kernel=[10,3,3] "
        "num_conv_pos_embeddings=16 num_conv_pos_embedding_groups=4 "
        "mask_time_prob=0.0"  # else NumPy draws
    ),
    # Images
    "vit": _images(f"{_PATCHES} intermediate_size=96"),
    "dinov2": _images(f"{_PATCHES.replace('layers=1', 'layers=2')} drop_path_rate=0.2"),
    # Its windows are shifted in every second layer.
    "swin": _images(
        "embed_dim=16 depths=[2,1] num_heads=[2,4] window_size=4 image_size=32 patch_size=2 "
        "hidden_dropout_prob=0.1"
    ),
    "segformer": _images(
        "num_encoder_blocks=2 depths=[1,1] hidden_sizes=[16,32] num_attention_heads=[1,2] "
        "sr_ratios=[4,2] strides=[4,2] patch_sizes=[7,3] mlp_ratios=[2,2] hidden_dropout_prob=0.1",
        side=48,
    ),
    "resnet": _images(
        "embedding_size=16 hidden_sizes=[16,32] depths=[1,1] layer_type=basic", side=48
    ),
    "convnext": _images(
        "hidden_sizes=[16,32] depths=[1,2] num_stages=2 image_size=64 drop_path_rate=0.5 "
        "layer_scale_init_value=1.0",  # by default, what a path adds or drops is next to nothing
        side=32,  # Inductor compiles anew for every other size
    ),
}
