"""A chunked loss: the step of a language model with its loss in one piece, and in chunks of tokens.

``modelled``: models of real size; nothing runs. Both steps are planned at the same share of their peaks, with the costs of an
H100. Share 0 is the least peak. ``fit`` finds the largest batch of an 8B Llama on 80 GiB.

``measured``: small models with a real vocabulary, compiled for the CPU. The allocator's peak; medians of steps that run in
turns; the largest difference of a gradient from eager PyTorch, relative to the gradient's norm.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, timed
from benchmarks.figures import above
from benchmarks.workloads import SMALL_VOCABULARIES, VOCABULARIES, captured, step_of
from remat.running.measure import measure_step
from tests.model_type_steps import distances
from tests.models import Step

COST = "roofline:h100"
BUDGETS = (0.3, 0.0)
#: The most that a chunked step may take of the peak and of the time of the whole step.
LIMITS = {"peak_ratio": 0.7, "step_ratio": 1.05}
REPEATS = 9
LARGEST = "llama-8b: largest batch"


def modelled(case: Case) -> Row:
    """Plans the whole and the chunked step of a model."""
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
    work = SMALL_VOCABULARIES[case.workload]
    model, (batch,) = work.build(), work.batches(1)
    train = Step(model=model, kwargs=batch, loss=lambda loss: loss).train
    eager = train()
    torch._dynamo.reset()
    steps = [
        torch.compile(model, backend="remat", options={"budget": f"peak:{case.budget}", **options})
        for options in ({}, {"chunk": "auto"})
    ]
    worst = max(distances(train(step).gradients, eager.gradients) for step in steps)
    peaks = [
        measure_step(step, (), batch, resident=model.parameters(), by="allocator").peak_bytes
        for step in steps
    ]
    ratios = []
    for _ in range(REPEATS):
        times = []
        for step in steps:
            model.zero_grad()
            times.append(timed(lambda step=step: step(**batch).backward())[0])
        ratios.append(times[1] / times[0])
    return case.row(
        whole_peak_bytes=peaks[0],
        peak_bytes=peaks[1],
        peak_ratio=peaks[1] / peaks[0],
        step_ratio=statistics.median(ratios),
        worst_gradient=worst,
        chunk=remat.plans()[-1].chunk,
    )


def largest(case: Case) -> Row:
    """The largest batch, of 2,048 tokens each, of an 8B Llama in bfloat16 with AdamW on 80 GiB."""
    model, _, batch = step_of("llama-8b")
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
    found: dict[str, Row] = {}
    for row in rows:
        if "peak_ratio" in row:
            worst = found.setdefault(f"{row['side']} at {row['budget']:g}", {})
            for key in ("peak_ratio", "step_ratio", "worst_gradient"):
                if key in row:
                    worst[key] = max(row[key], worst.get(key, 0.0))
    return found


def missed(summary: Row) -> list[str]:
    sides = (side for side in summary if side.endswith(f" {BUDGETS[0]}"))
    return [f"{side}: {what}" for side in sides for what in above(summary[side], LIMITS)]


EXPERIMENTS = {
    "chunked-loss": Experiment(
        about="the step of a language model with its loss whole, and in chunks",
        cases=(
            *grid(VOCABULARIES, BUDGETS, ("modelled",)),
            *grid(SMALL_VOCABULARIES, BUDGETS[:1], ("measured",)),
            Case(workload=LARGEST, side="fit"),
        ),
        quick=grid(("llama-32k",), BUDGETS[:1], ("measured",)),
        measure=measure_chunks,
        summarise=summarise,
        missed=missed,
    ),
}
