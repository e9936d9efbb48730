"""Recipes for `transformers` models: which class trains one, and what a training step is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build a kind of model, and what one training step is given.

    Attributes:
        label: what it does.
        models: the table in `transformers` of the types of this kind.
        auto: the class in `transformers` that builds it.
        inputs: (config, batch, seq, float dtype) to keyword arguments on the meta device.
        takes_seq: whether a sequence length means anything.
    """

    label: str
    models: str
    auto: str
    inputs: Callable[[Any, int, int, Any], dict[str, Any]]
    takes_seq: bool = True


def recipe_for(model_type: str) -> Recipe:
    """The recipe for a model type; where several are, the first of `RECIPES`.

    Raises:
        click.UsageError: there is none.
    """
    from transformers.models.auto import modeling_auto

    for recipe in RECIPES:
        if model_type in getattr(modeling_auto, recipe.models):
            return recipe
    labels = ", ".join(recipe.label for recipe in RECIPES)
    raise click.UsageError(
        f"MODEL is 'hf:{model_type}', a type that does none of {labels}; write a function that returns "
        "(model, args, kwargs) and give it as file.py:function"
    )


def draw(inputs: Mapping[str, Any], config: Any, device: str) -> dict[str, Any]:
    """Inputs on a device, of the shapes of those on the meta device, which stay as they are for it.

    Args:
        inputs: what `Recipe.inputs` returned.
        config: of the model that they are for; it bounds words and classes.
        device: where to; anywhere but on the meta device they are drawn from the default generator.
    """
    import torch

    if device == "meta":
        return dict(inputs)
    drawn: dict[str, Any] = {}
    for name, like in inputs.items():
        if like.is_floating_point():
            drawn[name] = torch.randn_like(like, device=device)
            continue
        is_class = like.dim() == 1
        # The first words of a vocabulary pad a text or end it; padding asks for a mask.
        first = 0 if is_class else min(3, config.get_text_config().vocab_size - 1)
        end = config.num_labels if is_class else config.get_text_config().vocab_size
        drawn[name] = torch.randint(first, end, like.shape, device=device)
    return drawn


def _tokens(batch: int, seq: int) -> Any:
    import torch

    return torch.zeros(batch, seq, dtype=torch.long, device="meta")


def _language(config: Any, batch: int, seq: int, dtype: Any) -> dict[str, Any]:
    return {"input_ids": _tokens(batch, seq), "labels": _tokens(batch, seq)}


def _speech(config: Any, batch: int, seq: int, dtype: Any) -> dict[str, Any]:
    import torch

    bins = getattr(config, "num_mel_bins", None)
    positions = getattr(config, "max_source_positions", None)
    if bins is None or positions is None:
        raise _no_recipe(config)
    frames = 2 * positions  # the encoder's convolutions halve them
    features = torch.zeros(batch, bins, frames, dtype=dtype, device="meta")
    return {"input_features": features, "labels": _tokens(batch, seq)}


def _waveform(config: Any, batch: int, seq: int, dtype: Any) -> dict[str, Any]:
    import torch

    samples_per_frame = getattr(config, "inputs_to_logits_ratio", None)
    if samples_per_frame is None:
        raise _no_recipe(config)
    # Two frames for a token: between two of the same there is a blank. One for the kernels' margin.
    wave = torch.zeros(batch, (2 * seq + 1) * samples_per_frame, dtype=dtype, device="meta")
    return {"input_values": wave, "labels": _tokens(batch, seq)}


def _no_recipe(config: Any) -> click.UsageError:
    return click.UsageError(
        f"hf:{config.model_type} has no recipe for its audio input; write a function that "
        "returns (model, args, kwargs) and give it as file.py:function"
    )


def _images(config: Any, batch: int, seq: int, dtype: Any) -> dict[str, Any]:
    import torch

    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    pixels = torch.zeros(batch, channels, height, width, dtype=dtype, device="meta")
    return {
        "pixel_values": pixels,
        "labels": torch.zeros(batch, dtype=torch.long, device="meta"),
    }


# In the order in which they are tried: many types do several of these.
RECIPES = (
    Recipe(
        "sequence to sequence",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "AutoModelForSeq2SeqLM",
        _language,
    ),
    Recipe(
        "speech to text",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "AutoModelForSpeechSeq2Seq",
        _speech,
    ),
    Recipe(
        "image classification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForImageClassification",
        _images,
        takes_seq=False,
    ),
    Recipe(
        "masked language modelling",
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "AutoModelForMaskedLM",
        _language,
    ),
    Recipe(
        "causal language modelling",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "AutoModelForCausalLM",
        _language,
    ),
    Recipe(
        "speech recognition",
        "MODEL_FOR_CTC_MAPPING_NAMES",
        "AutoModelForCTC",
        _waveform,
    ),
)
