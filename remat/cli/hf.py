"""Build the model of ``hf:TYPE``: a `transformers` model without pretrained weights."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
from collections.abc import Sequence
from typing import Any

import click

from remat.cli.example import Example
from remat.cli.hf_recipes import draw, recipe_for
from remat.errors import CaptureError, did_you_mean

BATCH = 4
SEQ = 512


def build(
    kind: str,
    overrides: Sequence[str] = (),
    *,
    batch: int | None = None,
    seq: int | None = None,
    device: str = "meta",
) -> Example:
    """Build a `transformers` model in train mode, and the inputs and labels of a training step.

    Args:
        kind: the ``model_type`` of the config, such as ``"llama"``.
        overrides: ``key=value`` texts for the config.
        batch: batch size; None: `BATCH`.
        seq: sequence length; None: `SEQ`, or the config's longest sequence if that is shorter.
        device: device of weights and inputs. On the meta device nothing is allocated; on any other
            device, weights and inputs are random.

    Raises:
        click.UsageError: the type is unknown or has no recipe, or an override or ``seq`` does not
            fit the model.
        CaptureError: `transformers` fails to build the model.
    """
    kind = check_kind(kind)
    import transformers

    transformers.logging.set_verbosity_error()
    recipe = recipe_for(kind)
    if seq is not None and not recipe.takes_seq:
        raise click.UsageError(f"--seq has no meaning for hf:{kind}, which does {recipe.label}")
    config = _config(kind, overrides)
    model = _model(kind, getattr(transformers, recipe.auto), config, device)
    batch = BATCH if batch is None else batch
    seq = _sequence(config, seq)
    kwargs = draw(recipe.inputs(config, batch, seq, model.dtype), config, device)
    count = sum(p.numel() for p in model.parameters())
    shape = f"batch {batch}" + (f" × {seq} tokens" if recipe.takes_seq else "")
    title = (
        f"{type(model).__name__}, {count:,} parameters in {str(model.dtype).partition('.')[2]}, "
        f"{shape}, {recipe.label}"
    )
    return Example(model=model, args=(), kwargs=kwargs, title=title)


def check_kind(kind: str) -> str:
    """Return a model type in the spelling of `transformers`; raise a UsageError if the type is unknown."""
    # A model built from its config needs no download. Offline mode prevents attempts to download.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers  # noqa: F401
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        raise click.UsageError(
            f"hf:{kind} needs the package 'transformers': pip install 'remat[hf]'"
        ) from None
    names = list(CONFIG_MAPPING_NAMES)
    for candidate in (kind, kind.lower(), kind.lower().replace("-", "_")):
        if candidate in names:
            return candidate
    meant = did_you_mean(kind.lower(), names, prefix="hf:")
    raise click.UsageError(
        f"MODEL is 'hf:{kind}', but transformers has no model type '{kind}'{meant}"
    )


def _config(kind: str, overrides: Sequence[str]) -> Any:
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    values: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise click.UsageError(f"'{text}' is no override; expected key=value")
        if not hasattr(default, key) and not _is_read(default, key):
            keys = [k for k in (*vars(default), *default.attribute_map) if not k.startswith("_")]
            raise click.UsageError(
                f"the config of hf:{kind} has no '{key}'{did_you_mean(key, keys)}"
            )
        values[key] = _literal(value)
    try:
        config = AutoConfig.for_model(kind, **values)
    except Exception as error:  # each config checks in its own way
        reason = " ".join(str(error).split())
        raise click.UsageError(
            f"the config of hf:{kind} refuses {', '.join(overrides)}: {reason}"
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False  # the cache of keys and values serves generation, not training
    if getattr(config, "architectures", None) is None:
        # If several classes fit a type and a task, transformers iterates over `architectures`, which must not be None.
        # With an empty list, transformers takes the first class.
        config.architectures = []
    if getattr(config, "is_encoder_decoder", False):
        # The model shifts labels right with these tokens. Pretrained checkpoints set these tokens, but
        # default configs may not.
        for key in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, key, None) is None:
                setattr(config, key, 0)
    return config


def _is_read(config: Any, key: str) -> bool:
    """Return whether a model reads a setting that its config does not declare, such as ``head_dim`` of Qwen3-MoE."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        source = inspect.getsource(importlib.import_module(name))
    except (ImportError, OSError):
        return False
    return f'getattr(config, "{key}"' in source


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _model(kind: str, auto: Any, config: Any, device: str) -> Any:
    """Build the model on a device; raise a CaptureError if `transformers` fails."""
    import torch
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from remat.torch_compat import FakeTensorMode

    try:
        with torch.device(device):
            return _trainable(auto.from_config(config))
    except Exception as error:  # code of transformers, which raises any class
        first = error
    if device == "meta":
        fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        # If this attempt fails too, the first error is reported.
        with contextlib.suppress(Exception), fakes:
            return _trainable(auto.from_config(config))
    reason = " ".join(str(first).split())
    raise CaptureError(
        f"transformers cannot build hf:{kind} from this config: {type(first).__name__}: {reason}"
    ) from first


def _trainable(model: Any) -> Any:
    """Return a model in train mode, with the loss ``ForCausalLM`` if `transformers` has no loss for this class."""
    # If no loss were set, `transformers` would choose ``ForCausalLM`` when the model runs, and log a warning, which
    # Dynamo cannot trace.
    from transformers.loss.loss_utils import LOSS_MAPPING

    if getattr(model, "loss_type", None) not in LOSS_MAPPING:
        model.loss_type = "ForCausalLM"
    return model.train()


def _sequence(config: Any, seq: int | None) -> int:
    """Return the sequence length ``seq`` or, if None, the shorter of `SEQ` and the config's longest sequence."""
    if seq is not None:
        return seq
    limits = [getattr(config, n, None) for n in ("max_position_embeddings", "max_target_positions")]
    return min([SEQ, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
