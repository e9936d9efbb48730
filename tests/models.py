"""Small, real architectures with random weights: what the tests train and the benchmarks measure.

Every model is tiny (a step takes milliseconds) but keeps what makes its architecture hard to plan:
dropout, BatchNorm's running statistics, checkpointed regions, noise, a buffer that the step mutates
after reading it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One training step.

    Attributes:
        model: in training mode, with random weights.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        loss: scalar that the step differentiates, from what the model returns.
        begin: called before each step: what is no parameter, buffer or generator is as it was built.
        initial: parameters and buffers as they were built.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor]
    begin: Callable[[], None] = lambda: None
    initial: Mapping[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        object.__setattr__(self, "initial", state)

    def __call__(self, compiled: Callable[..., Any] | None = None) -> tuple[Any, torch.Tensor]:
        """Runs forward (of ``compiled``, else of the model) and returns its output and the loss."""
        out = (self.model if compiled is None else compiled)(*self.args, **self.kwargs)
        return out, self.loss(out)

    def train(self, compiled: Callable[..., Any] | None = None, seed: int = 7) -> Outcome:
        """Runs one step from the initial weights and a seed, and returns everything it left behind."""
        model = self.model
        model.load_state_dict(self.initial)
        model.zero_grad(set_to_none=True)
        self.begin()
        torch.manual_seed(seed)
        out, loss = self(compiled)
        loss.backward()  # type: ignore[no-untyped-call]
        values = {"loss": loss}
        for i, leaf in enumerate(pytree.tree_leaves(out)):
            if isinstance(leaf, torch.Tensor):
                values[f"output {i}"] = leaf
        return Outcome(
            outputs={k: v.detach().clone() for k, v in values.items()},
            gradients={
                k: p.grad.detach().clone()
                for k, p in model.named_parameters()
                if p.grad is not None
            },
            buffers={k: b.detach().clone() for k, b in model.named_buffers()},
            random_state=torch.get_rng_state(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What one training step leaves behind.

    Attributes:
        outputs: the loss and every tensor that forward returns.
        gradients: of the parameters that have one, by name.
        buffers: by name, after the step.
        random_state: of the default generator, after the step.
    """

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    random_state: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, by what it is."""
        return {
            **self.outputs,
            **{f"gradient of {k}": v for k, v in self.gradients.items()},
            **{f"buffer {k}": v for k, v in self.buffers.items()},
            "random state": self.random_state,
        }

    def differs_from(self, other: Outcome) -> list[str]:
        """What is not bit for bit the same."""
        mine, theirs = self.tensors(), other.tensors()
        names = sorted(mine.keys() ^ theirs.keys())
        return names + [k for k in mine if k in theirs and not torch.equal(mine[k], theirs[k])]

    def gradient_distance(self, reference: Outcome) -> float:
        """Norm of the difference of all gradients together, relative to their norm in ``reference``.

        Infinite where another set of parameters has gradients, or where a number is not finite.
        """
        if self.gradients.keys() != reference.gradients.keys():
            return math.inf
        pairs = [(self.gradients[k].double(), g.double()) for k, g in reference.gradients.items()]
        away = sum(float((a - b).square().sum()) for a, b in pairs)
        norm = sum(float(b.square().sum()) for _, b in pairs)
        return math.sqrt(away / norm) if math.isfinite(away) and norm else math.inf


def _tokens(length: int = 16) -> torch.Tensor:
    return torch.randint(0, 64, (2, length))


def _text() -> dict[str, torch.Tensor]:
    ids = _tokens()
    return {"input_ids": ids, "labels": ids}


def _padded_text() -> dict[str, torch.Tensor]:
    text = _text()
    mask = torch.ones_like(text["input_ids"])
    mask[0, 12:] = 0
    return {**text, "attention_mask": mask}


_TWO_LAYERS = "hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4"


def _images(side: int, *labels: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(len(labels), 3, side, side),
        "labels": torch.tensor(labels),
    }


def _transformers(
    name: str, config: str, inputs: Callable[[], dict[str, torch.Tensor]]
) -> Callable[[], Step]:
    """A builder of a step of a class of `transformers`, with its config as on the command line."""

    def made() -> Step:
        import transformers

        pairs = (pair.split("=") for pair in config.split())
        kind, given = getattr(transformers, name), inputs()
        model = kind(kind.config_class(**{k: ast.literal_eval(v) for k, v in pairs})).train()
        # Without a type GPT-2 logs on the first call: a graph break.
        model.loss_type = model.loss_type or "ForCausalLM"
        return Step(model=model, kwargs=given, loss=lambda out: out.loss)

    return made


class Noisy(nn.Module):
    """Adds fresh noise to its activations."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            x = torch.tanh(h + 0.5 * torch.randn_like(h)) * torch.sigmoid(h)
        return x


class Checkpointed(nn.Module):
    """Blocks with dropout; every second one is a checkpointed region."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i % 2 == 0:
                x = x + checkpoint(block, x, use_reentrant=False)
            else:
                x = x + block(nn.functional.layer_norm(x, x.shape[-1:]))
        return x


class MutatedBuffer(nn.Module):
    """Reads a buffer and writes to it later in the same step."""

    buf: torch.Tensor

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.register_buffer("buf", torch.randn(width, width) / width**0.5)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.buf @ self.buf)
        y = torch.tanh(self.inner(x) @ h)
        self.buf.add_(1)
        return self.outer(y) @ torch.cos(h)


def _squared(model: nn.Module, shape: tuple[int, ...], **begin: Callable[[], None]) -> Step:
    args = (torch.randn(shape),)
    return Step(model=model.train(), args=args, loss=lambda out: out.square().mean(), **begin)


def _custom(name: str, *, regions: bool) -> Callable[[], Step]:
    def made() -> Step:
        from tests.custom_operators import Blocks
        from tests.fuzz.functions import begin_run

        return _squared(Blocks(name, regions=regions), (32, 64), begin=begin_run)

    return made


#: Models with custom operators (`tests.custom_operators`), by name.
CUSTOM: Mapping[str, Callable[[], Step]] = {
    "custom_random": _custom("random", regions=True),
    "custom_counting": _custom("counting", regions=False),
    "custom_mutating": _custom("mutating", regions=False),
    "custom_pure": _custom("pure", regions=True),
}

#: Every model by name; a builder draws weights and inputs from the default generator.
ZOO: Mapping[str, Callable[[], Step]] = {
    "llama": _transformers(
        "LlamaForCausalLM",
        f"{_TWO_LAYERS} vocab_size=64 num_key_value_heads=2 use_cache=False",
        _text,
    ),
    # The dropouts of GPT-2, BERT and T5 are 0.1 by default.
    "gpt2": _transformers(
        "GPT2LMHeadModel",
        "vocab_size=64 n_positions=32 n_embd=32 n_layer=2 n_head=4 use_cache=False bos_token_id=0 "
        "eos_token_id=0",
        _text,
    ),
    "bert": _transformers(
        "BertForMaskedLM", f"{_TWO_LAYERS} vocab_size=64 max_position_embeddings=32", _padded_text
    ),
    "t5": _transformers(
        "T5ForConditionalGeneration",
        "vocab_size=64 d_model=32 d_kv=8 d_ff=64 num_layers=1 num_decoder_layers=1 num_heads=4 "
        "use_cache=False decoder_start_token_id=0",
        lambda: {"input_ids": _tokens(), "labels": _tokens(8)},
    ),
    "vit": _transformers(
        "ViTForImageClassification",
        f"{_TWO_LAYERS} image_size=16 patch_size=4 num_labels=5 hidden_dropout_prob=0.1",
        lambda: _images(16, 1, 3),
    ),
    "resnet": _transformers(
        "ResNetForImageClassification",
        "embedding_size=8 hidden_sizes=[16,32] depths=[1,1] num_labels=5 layer_type='basic'",
        lambda: _images(32, 1, 3, 0, 4),
    ),
    "randn_like": lambda: _squared(Noisy(), (32, 64)),
    "checkpointed": lambda: _squared(Checkpointed(), (32, 64)),
    "mutated_buffer": lambda: _squared(MutatedBuffer(), (32, 48)),
}


def build(name: str, seed: int = 0) -> Step:
    """Builds a model of the zoo, or one with custom operators; the same seed gives the same weights and inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {**ZOO, **CUSTOM}[name]()
