"""``hf:TYPE``: what each kind of model is given, on the meta device and on a real one."""

from __future__ import annotations

import click
import pytest
import torch

import remat
from remat.cli import hf
from remat.cli.hf_recipes import recipe_for

GPT2 = "n_layer=1 n_embd=48 vocab_size=9"
WAV2VEC2 = (
    "vocab_size=9 hidden_size=48 num_hidden_layers=1 num_attention_heads=4 intermediate_size=64 "
    "conv_dim=[16,16] conv_stride=[5,2] conv_kernel=[10,3] num_conv_pos_embeddings=8 "
    "num_conv_pos_embedding_groups=4"
)


@pytest.mark.parametrize(
    ("kind", "dropout", "overrides"),
    [
        ("bert", True, "num_hidden_layers=1 hidden_size=48 intermediate_size=96 vocab_size=99"),
        ("resnet", False, "depths=[1,1] hidden_sizes=[16,32] embedding_size=8 layer_type=basic"),
        (
            "whisper",
            False,
            "encoder_layers=1 decoder_layers=1 d_model=48 max_source_positions=20 vocab_size=99 "
            "encoder_attention_heads=4 decoder_attention_heads=4 pad_token_id=0",
        ),
    ],
)
def test_a_model_is_planned_without_weights(kind: str, dropout: bool, overrides: str) -> None:
    example = hf.build(kind, overrides.split(), batch=2)
    assert example.model.training
    assert {p.device.type for p in example.model.parameters()} == {"meta"}
    count = sum(p.numel() for p in example.model.parameters())
    assert f" {count:,} parameters in float32, batch 2" in example.title
    joint = remat.capture(example.model, example.args, example.kwargs, lower="eager")
    assert any("dropout" in str(n.target) for n in joint.graph.nodes) is dropout
    assert remat.plan(joint, 0.5).saved_bytes > 0


def test_on_a_device_weights_and_inputs_are_drawn_from_the_generator() -> None:
    def built(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(seed)
        example = hf.build("gpt2", GPT2.split(), batch=2, seq=64, device="cpu")
        return example.model.state_dict(), dict(example.kwargs)

    (weights, inputs), (same_weights, same_inputs) = built(0), built(0)
    _, others = built(1)
    assert all(torch.equal(w, same_weights[k]) for k, w in weights.items())
    assert torch.equal(inputs["input_ids"], same_inputs["input_ids"])
    assert not torch.equal(inputs["input_ids"], others["input_ids"])
    assert not torch.equal(inputs["input_ids"], inputs["labels"])
    assert inputs["input_ids"].shape == (2, 64)
    # Words, but for those that pad a text or end it.
    assert inputs["input_ids"].unique().tolist() == [3, 4, 5, 6, 7, 8]


def test_labels_of_images_are_classes() -> None:
    config = "embedding_size=8 hidden_sizes=[8] depths=[1] layer_type=basic num_labels=3"
    torch.manual_seed(0)
    example = hf.build("resnet", config.split(), batch=64, device="cpu")
    assert example.kwargs["labels"].unique().tolist() == [0, 1, 2]
    assert example.kwargs["pixel_values"].std() == pytest.approx(1, abs=0.01)


def test_speech_is_recognised_by_frame() -> None:
    torch.manual_seed(0)
    example = hf.build("wav2vec2", WAV2VEC2.split(), batch=2, seq=7, device="cpu")
    assert example.kwargs["labels"].shape == (2, 7)
    out = example.model(**example.kwargs)
    assert out.logits.shape[1] >= 2 * 7  # else no text of that length has a finite loss
    assert out.loss.isfinite()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_speech_on_the_meta_device_is_planned() -> None:
    """In two graphs or more: this type turns an input into one that requires a gradient."""
    example = hf.build(
        "wav2vec2", [*WAV2VEC2.split(), "mask_time_prob=0.0", "layerdrop=0.0"], batch=2
    )
    waves = {"input_values": example.kwargs["input_values"]}
    joints = remat.capture(example.model, (), waves, lower="eager", fullgraph=False)
    assert len(joints) > 1
    assert remat.plan(joints, 0.5).saved_bytes > 0


def test_a_type_without_a_recipe_is_refused() -> None:
    with pytest.raises(click.UsageError, match="has no recipe for its audio input"):
        hf.build("parakeet_ctc", batch=2)


def test_a_type_of_several_kinds_is_of_the_first() -> None:
    assert recipe_for("bart").auto == "AutoModelForSeq2SeqLM"
    assert recipe_for("bert").auto == "AutoModelForMaskedLM"


def test_settings_that_only_the_model_reads_are_overrides_too() -> None:
    sizes = "hidden_size=64 num_hidden_layers=1 num_attention_heads=2 num_key_value_heads=1 vocab_size=99"
    example = hf.build("qwen3_moe", [*sizes.split(), "num_experts=2", "head_dim=48"], batch=2)
    assert example.model.config.head_dim == 48
    assert "q_proj.weight" in next(
        name for name, p in example.model.named_parameters() if p.shape == (2 * 48, 64)
    )
    with pytest.raises(click.UsageError, match="has no 'heads_dim'"):
        hf.build("qwen3_moe", ["heads_dim=48"])
