"""Steps that are compiled in pieces, under a peak in bytes: from which step on it holds, and what that costs.

``blocks``: a model whose layers are compiled one by one, or whose graph breaks after every second layer. The budget is the share of the
bytes that the whole model takes at budget 1. ``first`` and ``held`` are the counted peaks of the first step and of the last one, as ratios
of the budget; ``from_step`` is the first step that held it. ``cost`` is the cost that the plans of all runs add, divided by that of the plan
of the whole model within the same budget. Gradients are compared with those of eager PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import remat
from benchmarks.experiment import Case, Experiment, Row, grid
from benchmarks.figures import ratio_of
from remat.errors import BudgetWarning
from remat.integrations import stages, step_tally

STEPS, LAYERS = 5, 8


class Layer(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layers, self.breaks = nn.ModuleList(Layer() for _ in range(LAYERS)), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # PyTorch compiles nothing where a graph breaks inside of a loop.
        x = self.layers[1](self.layers[0](x))
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.layers[3](self.layers[2](x))
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.layers[5](self.layers[4](x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.layers[7](self.layers[6](x)).square().mean()


def llama() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=LAYERS, use_cache=False, **sizes)
    model, ids = LlamaForCausalLM(config), torch.randint(0, 1000, (4, 256))
    return model, lambda m: m(input_ids=ids, labels=ids).loss, model.model.layers


def dit() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor], Any]:
    """Needs Diffusers. ``compile_repeated_blocks`` does the same for its models that name their blocks; this one names none."""
    from diffusers import DiTTransformer2DModel

    heads = {"num_attention_heads": 4, "attention_head_dim": 32}
    # Keys have no bias, whose gradient is rounding errors only.
    sizes = {"num_layers": LAYERS, "sample_size": 32, "in_channels": 4, "attention_bias": False}
    model = DiTTransformer2DModel(**heads, **sizes).eval()  # else it drops labels
    x, noise = torch.randn(2, 4, 4, 32, 32)
    of = {"timestep": torch.randint(0, 1000, (4,)), "class_labels": torch.randint(0, 1000, (4,))}
    return model, lambda m: (m(x, **of).sample - noise).square().mean(), model.transformer_blocks


def layers(*, breaks: bool) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor], Any]:
    model, x = Layers(breaks=breaks), torch.randn(4096, 128)
    return model, lambda m: m(x), () if breaks else model.layers


NETS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor], Any]]] = {
    "layers": lambda: layers(breaks=False),
    "breaks": lambda: layers(breaks=True),
    "llama": llama,
    "dit": dit,
}


def whole_plan(name: str, budget: Any, lower: str) -> remat.Plan:
    """The plan of the whole model as one graph."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, loss, _ = layers(breaks=False) if name == "breaks" else NETS[name]()
    model.compile(backend="remat", options={"budget": budget, "lower": lower})
    loss(model).backward()
    return remat.plans()[-1]


def measure_blocks(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    if name == "dit" and importlib.util.find_spec("diffusers") is None:
        print("blocks: 'dit' is left out, since Diffusers is missing; run pip install diffusers")
        return
    for case in cases:
        full = whole_plan(name, remat.Peak(1.0), case.side).peak_bytes
        limit = int(case.budget * full)
        cost = whole_plan(name, limit, case.side).recompute_cost
        torch.manual_seed(0)
        torch.compiler.reset()
        model, loss, pieces = NETS[name]()
        right = torch.autograd.grad(loss(model), [*model.parameters()])
        options = {"budget": limit, "lower": case.side}
        for piece in pieces:
            piece.compile(backend="remat", options=options)
        if not pieces:
            model.compile(backend="remat", options=options)
        peaks, off, added = [], 0.0, list[int]()
        counted = step_tally.tally_of(limit)
        for _ in range(2 if quick else STEPS):
            added.clear()
            with warnings.catch_warnings(), counting_costs(added):
                warnings.simplefilter("ignore", BudgetWarning)
                found = torch.autograd.grad(loss(model), [*model.parameters()])
            off = max(off, *(_off(a, b) for a, b in zip(found, right, strict=True)))
            peaks.append(counted._peak)
        yield case.row(
            budget_bytes=limit,
            first=ratio_of(peaks[0], limit),
            held=ratio_of(peaks[-1], limit),
            from_step=next((k for k, peak in enumerate(peaks, 1) if peak <= limit), None),
            cost=ratio_of(sum(added), cost),
            gradients_off=off,
        )


@contextlib.contextmanager
def counting_costs(added: list[int]) -> Iterator[None]:
    """Append the recompute cost of each run of a graph that is compiled from now on."""
    known = _COSTS
    own = stages.Planned.count_runs

    def count_runs(planned: Any, *arguments: Any) -> Any:
        count = own(planned, *arguments)
        cost = planned.plan.recompute_cost

        def ran(*run: Any) -> None:
            known[0].append(cost)
            count(*run)

        return ran

    known[0] = added
    with mock.patch.object(stages.Planned, "count_runs", count_runs):
        yield


#: The list that compiled graphs append to.
_COSTS: list[list[int]] = [[]]


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def summarise_blocks(rows: list[Row]) -> Row:
    return {
        "held": sum(row["held"] <= 1 for row in rows),
        "of": len(rows),
        "worst_from_step": max(row["from_step"] or STEPS + 1 for row in rows),
        "worst_cost": max(row["cost"] for row in rows),
        "gradients_off": max(row["gradients_off"] for row in rows),
    }


EXPERIMENTS = {
    "blocks": Experiment(
        about="steps that are compiled in pieces: from which step on they hold a peak in bytes, and at what cost",
        cases=grid(NETS, (0.75, 0.5), ("eager", "inductor")),
        quick=grid(("layers",), (0.75,), ("eager",)),
        measure=measure_blocks,
        summarise=summarise_blocks,
    )
}
