"""Recipes for `transformers` models: the class to train, and the inputs of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rules for one task: which class to build for a model type, and the inputs of one training step.

    Attributes:
        label: the task, such as ``"causal language modelling"``.
        task: the task as ``MODEL_FOR_<task>_MAPPING_NAMES`` of `transformers` spells it. The mapping has a key for
            each model type that does the task.
        auto: name of the `transformers` class that builds the model.
        inputs: function (config, batch size, sequence length, float dtype) -> keyword arguments for
            the model, as tensors on the meta device.
        takes_seq: whether the inputs depend on the sequence length.
    """

    label: str
    task: str
    auto: str
    inputs: Callable[[Any, int, int, Any], dict[str, Any]]
    takes_seq: bool = True


def recipe_for(model_type: str) -> Recipe:
    """Return the recipe for a model type; if several recipes fit, the first one in `RECIPES`.

    Raises:
        click.UsageError: no recipe fits the model type.
    """
    from transformers.models.auto import modeling_auto

    for recipe in RECIPES:
        if model_type in getattr(modeling_auto, f"MODEL_FOR_{recipe.task}_MAPPING_NAMES"):
            return recipe
    labels = ", ".join(recipe.label for recipe in RECIPES)
    raise click.UsageError(
        f"MODEL is 'hf:{model_type}', a type that does none of {labels}; write a function that returns "
        "(model, args, kwargs) and give it as file.py:function"
    )


def draw(inputs: Mapping[str, Any], config: Any, device: str) -> dict[str, Any]:
    """Return the inputs of a training step on a device: random tensors or, on the meta device, ``inputs`` unchanged.

    Random numbers come from PyTorch's default generator. Token ids and class labels stay below the limits in the
    model's config.
    """
    import torch

    if device == "meta":
        return dict(inputs)
    tensors: dict[str, Any] = {}
    for name, like in inputs.items():
        if like.is_floating_point():
            tensors[name] = torch.randn_like(like, device=device)
            continue
        is_class = like.dim() == 1  # labels of images have one dimension, token ids have two
        # The first tokens of a vocabulary often mean padding or the end. Padding would require a mask.
        first = 0 if is_class else min(3, config.get_text_config().vocab_size - 1)
        end = config.num_labels if is_class else config.get_text_config().vocab_size
        tensors[name] = torch.randint(first, end, like.shape, device=device)
    return tensors


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
    frames = 2 * positions  # the product of the strides of the encoder's convolutions is 2
    features = torch.zeros(batch, bins, frames, dtype=dtype, device="meta")
    return {"input_features": features, "labels": _tokens(batch, seq)}


def _waveform(config: Any, batch: int, seq: int, dtype: Any) -> dict[str, Any]:
    import torch

    samples_per_frame = getattr(config, "inputs_to_logits_ratio", None)
    if samples_per_frame is None:
        raise _no_recipe(config)
    # CTC needs two frames per token, because equal neighbours have a blank between them. The sound wave is one frame
    # longer, because convolutions without padding shorten the output.
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


# Recipes in the order in which they are tried. Many model types fit several recipes; the first one is taken.
RECIPES = (
    Recipe("sequence to sequence", "SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM", _language),
    Recipe("speech to text", "SPEECH_SEQ_2_SEQ", "AutoModelForSpeechSeq2Seq", _speech),
    Recipe(
        "image classification",
        "IMAGE_CLASSIFICATION",
        "AutoModelForImageClassification",
        _images,
        takes_seq=False,
    ),
    Recipe("masked language modelling", "MASKED_LM", "AutoModelForMaskedLM", _language),
    Recipe("causal language modelling", "CAUSAL_LM", "AutoModelForCausalLM", _language),
    Recipe("speech recognition", "CTC", "AutoModelForCTC", _waveform),
)
