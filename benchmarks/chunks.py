"""A chunked loss: the step of a language model with its loss in one piece, and in chunks of tokens.

``modelled``: models of real size; nothing runs. Both steps are planned at the same share of their peaks, with the costs of an
H100. Share 0 is the least peak. ``fit`` finds the largest batch of an 8B Llama on 80 GiB.

``measured``: small models with a real vocabulary, compiled for the CPU. The allocator's peak; medians of steps that run in
turns; the largest difference of a gradient from eager PyTorch, relative to the gradient's norm.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, quiet
from benchmarks.workloads import WithLoss
from remat.running.measure import measure_step
from tests.architectures import llama_8b

COST = "roofline:h100"
BUDGETS = (0.3, 0.0)
#: The most that a chunked step may take of the peak and of the time of the whole step.
PEAK, STEP = 0.7, 1.05
REPEATS = 9
Config = dict[str, Any]

#: Configurations of `transformers`: the class, layers at real size, what differs from the defaults, and a small size.
MODELS: dict[str, tuple[str, Config, Config]] = {
    "llama-32k": (
        "Llama",
        {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
         "num_attention_heads": 32, "num_key_value_heads": 4},
        {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2},
    ),
    "gpt2-50k": (
        "GPT2",
        {"vocab_size": 50257, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {"n_embd": 256, "n_layer": 2, "n_head": 4},
    ),
    "qwen2-152k": (
        "Qwen2",
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    "gemma2-256k": (
        "Gemma2",
        {"vocab_size": 256000, "num_hidden_layers": 26},
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 64},
    ),
}  # fmt: skip
RUN = ("llama-32k", "gpt2-50k")
LARGEST = "llama-8b: largest batch"


def model_of(name: str, *, small: bool, device: str) -> tuple[WithLoss, dict[str, torch.Tensor]]:
    """A model that returns its loss, and a batch."""
    import transformers

    kind, real, little = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **(real | little if small else real), use_cache=False
    )
    make = getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")
    torch.manual_seed(0)
    with torch.device(device):
        model = WithLoss(make(config)).train()
        ids = torch.randint(config.vocab_size, (4 if small else 16, 1024))
    model.model.loss_type = "ForCausalLM"
    return (model if small else model.to(torch.bfloat16)), {"input_ids": ids, "labels": ids}


@functools.lru_cache(maxsize=1)
def captured(name: str) -> remat.JointGraph:
    model, batch = model_of(name, small=False, device="meta")
    return remat.capture(model, (), batch, lower="inductor")


def modelled(case: Case) -> Row:
    """Plans the whole and the chunked step of a model."""
    assert case.budget is not None
    joint, budget = captured(case.workload), remat.Peak(case.budget)
    whole = remat.plan(joint, budget, cost=COST)
    chunked = remat.plan(joint, budget, cost=COST, chunk="auto")
    times = [plan.step_cost + plan.recompute_cost for plan in (whole, chunked)]
    return case.row(
        nodes=len(joint.graph.nodes),
        whole_peak_bytes=whole.peak_bytes,
        peak_bytes=chunked.peak_bytes,
        peak_ratio=chunked.peak_bytes / whole.peak_bytes,
        step_ratio=times[1] / times[0],
        chunk=chunked.chunk,
    )


def measured(case: Case) -> Row:
    """Compiles, runs and measures the whole and the chunked step of a small model."""
    model, batch = model_of(case.workload, small=True, device="cpu")
    model(**batch).backward()
    eager = {k: p.grad for k, p in model.named_parameters()}
    torch._dynamo.reset()
    steps = [
        torch.compile(model, backend="remat", options={"budget": f"peak:{case.budget}", **options})
        for options in ({}, {"chunk": "auto"})
    ]
    peaks, worst = [], 0.0
    held = [*model.parameters()]
    for step in steps:
        model.zero_grad()
        step(**batch).backward()
        for key, p in model.named_parameters():
            norm = eager[key].norm().clamp_min(1e-30)
            worst = max(worst, ((p.grad - eager[key]).norm() / norm).item())
        model.zero_grad()
        with quiet():
            found = measure_step(step, (), batch, resident=held, by="allocator")
        peaks.append(found.peak_bytes)
    plan = remat.plans()[-1]
    times: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for at, step in enumerate(steps):
            model.zero_grad()
            start = time.perf_counter()
            step(**batch).backward()
            times[at].append(time.perf_counter() - start)
    return case.row(
        whole_peak_bytes=peaks[0],
        peak_bytes=peaks[1],
        peak_ratio=peaks[1] / peaks[0],
        step_ratio=statistics.median(b / a for a, b in zip(*times, strict=True)),
        worst_gradient=worst,
        chunk=plan.chunk,
    )


def largest(case: Case) -> Row:
    """The largest batch, of 2,048 tokens each, of an 8B Llama in bfloat16 with AdamW on 80 GiB."""
    model, _, batch = llama_8b()
    ids = batch["input_ids"][:, :2048]

    def of(count: int) -> dict[str, torch.Tensor]:
        some = ids.expand(count, -1)
        return {"input_ids": some, "labels": some}

    found = {}
    for chunk in (None, "auto"):
        fit = remat.fit(model, of, memory="80GiB", optimizer="adamw", cost=COST, chunk=chunk)
        row = fit.largest
        found["chunked" if chunk else "whole"] = row.batch if row else 0
    return case.row(**found)


def measure_chunks(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    of_side = {"modelled": modelled, "measured": measured, "fit": largest}
    for case in cases:
        yield of_side[case.side](case)


def summarise(rows: list[Row]) -> Row:
    """The worst of each side and budget."""
    kinds = dict.fromkeys((row["side"], row["budget"]) for row in rows if "peak_ratio" in row)
    found = {kind: [row for row in rows if (row["side"], row["budget"]) == kind] for kind in kinds}
    return {
        f"{side} at {budget:g}": {
            key: max(row[key] for row in of)
            for key in ("peak_ratio", "step_ratio", "worst_gradient")
            if key in of[0]
        }
        for (side, budget), of in found.items()
    }


def missed(summary: Row) -> list[str]:
    return [
        f"{side}: {key} is {summary[side][key]:.3f}"
        for side in summary
        for key, limit in (("peak_ratio", PEAK), ("step_ratio", STEP))
        if summary[side][key] > limit and side.endswith(f" {BUDGETS[0]}")
    ]


EXPERIMENTS = {
    "chunked-loss": Experiment(
        name="chunked-loss",
        about="the step of a language model with its loss whole, and in chunks",
        cases=(
            *grid(MODELS, BUDGETS, ("modelled",)),
            *grid(RUN, BUDGETS[:1], ("measured",)),
            Case(workload=LARGEST, side="fit"),
        ),
        quick=grid(RUN[:1], BUDGETS[:1], ("measured",)),
        measure=measure_chunks,
        summarise=summarise,
        tables=("chunked-loss",),
        missed=missed,
    ),
}
