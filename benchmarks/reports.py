"""Public reports about PyTorch's partitioner, and the same steps under remat.

Issues of pytorch/pytorch:

- 197838: the peak rises where the budget falls. A Transformer of 16, 24 or 32 layers on 512, 768 or 1,024 tokens. Peaks are
  simulated, under PyTorch's ratio of saved bytes and under remat's share of the peak.
- 193193: blocks that run twice, checkpointed each time, take more memory compiled than eager. Peaks by the allocator, on a CPU.
  remat gets eager PyTorch's peak as its budget.
- 190758: below budget 1, dropout draws other numbers in backward. The share of elements whose gradient belongs to another mask.

``report-steps``: the Transformers of 197838 at the budgets of the report. remat plans at the simulated peak of PyTorch's plan, and at
67.2 % of it: a solver that was posted there, which knows which values are alive, took 32.8 % off the peak for 5 % of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.experiment import Case, Experiment, Row, grid
from benchmarks.figures import grouped
from benchmarks.plans import COST
from benchmarks.quality import by_pytorch
from benchmarks.torch_partitioner import partition
from benchmarks.workloads import text
from remat.errors import BudgetError
from remat.graph.memory.liveness import memory_curve
from remat.running.measure import measure_step
from tests.architectures import attend

RISES, DEEP, MASKS = "197838", "193193", "190758"
SIZES = {
    f"{RISES} ({layers} layers)": (layers, seq)
    for layers, seq in ((16, 512), (24, 768), (32, 1024))
}
BUDGETS = (1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)
DROPPED = (0.5, 0.0)


POSTED = 0.672


def transformer(name: str) -> remat.JointGraph:
    layers, seq = SIZES[name]
    with torch.device("meta"):
        work = text(
            "llama", 4, seq, vocab_size=1000, hidden_size=512, intermediate_size=2048,
            num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
        )  # fmt: skip
    return remat.capture(work.build("meta"), (), work.batches(1, "meta")[0], lower="inductor")


def rising(name: str, cases: Sequence[Case]) -> Iterator[Row]:
    joint = transformer(name)
    for case in cases:
        if case.side == "pytorch":
            modules = partition(joint.copy(), case.budget)
            peak = memory_curve(*modules, joint.num_fwd_outputs).peak_bytes
        else:
            peak = remat.plan(joint, remat.Peak(case.budget)).peak_bytes
        yield case.row(peak_bytes=peak)


def measure_steps(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    """Step of remat divided by PyTorch's, by the cost model; None if no plan has the peak."""
    joint = transformer(name)
    once = remat.plan(joint, 1, cost=COST).step_cost
    for case in cases:
        peak, recomputing = by_pytorch(joint, case.budget)
        found: Row = {}
        for share in (1, POSTED):
            try:
                plan = remat.plan(joint, remat.Peak(int(share * peak)), cost=COST)
            except BudgetError:
                found[f"step_at_{share}"] = None
                continue
            found[f"step_at_{share}"] = (once + plan.recompute_cost) / (once + recomputing)
        yield case.row(peak_bytes=peak, recomputing=recomputing / once, **found)


class Shared(nn.Module):
    """Blocks that run on a text alone, then on the text with an image; each run is checkpointed."""

    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def block(self, at: int, x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        norm = nn.functional.layer_norm
        x = x + attend(self.qkv[at](norm(x, x.shape[-1:])), 4)
        if image is not None:
            x = x + nn.functional.scaled_dot_product_attention(x, image, image)
        return x + self.down[at](nn.functional.gelu(self.up[at](norm(x, x.shape[-1:]))))

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        ends = []
        for context in (None, image):
            y = x
            for at in range(len(self.up)):
                y = checkpoint(self.block, at, y, context, use_reentrant=False)
            ends.append(y)
        return (ends[0] * ends[1]).mean()


def deep(name: str, cases: Sequence[Case]) -> Iterator[Row]:
    torch.manual_seed(0)
    model, args = Shared(), (torch.randn(4, 256, 256), torch.randn(4, 64, 256))
    eager = 0
    for case in cases:
        torch._dynamo.reset()
        step: Any = model
        if case.side == "pytorch":
            step = torch.compile(model)
        elif case.side == "remat":
            step = torch.compile(model, backend="remat", options={"budget": remat.Peak(eager)})
        peak = measure_step(step, args, resident=model.parameters(), by="allocator").peak_bytes
        eager = eager or peak
        yield case.row(peak_bytes=peak, of_eager=peak / eager)


def masked(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(dropout(torch.cos(x), 0.5))


def masks(name: str, cases: Sequence[Case]) -> Iterator[Row]:
    for case in cases:
        torch._dynamo.reset()
        x = torch.rand(1000, 1000, requires_grad=True)
        if case.side == "pytorch":
            with functorch.patch(activation_memory_budget=case.budget):
                y = torch.compile(masked)(x)
        else:
            y = torch.compile(masked, backend="remat", options={"budget": case.budget})(x)
        y.sum().backward()
        assert x.grad is not None
        wrong = ((y != 0) != (x.grad != 0)).float().mean().item()
        yield case.row(wrong=wrong)


def measure_reports(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    return {DEEP: deep, MASKS: masks}.get(name, rising)(name, cases)


def summarise(rows: list[Row]) -> Row:
    """By side and report: the highest peak at budget 0 over that at budget 1, the peak over eager PyTorch's, the wrong share."""
    found: Row = {}
    for side in ("pytorch", "remat"):
        of = grouped(row for row in rows if row["side"] == side)
        peaks = [[row["peak_bytes"] for row in of[name]] for name in SIZES if name in of]
        found[side] = {
            RISES: max((each[-1] / each[0] for each in peaks), default=None),
            DEEP: max((row["of_eager"] for row in of.get(DEEP, ())), default=None),
            MASKS: max((row["wrong"] for row in of.get(MASKS, ())), default=None),
        }
    return found


EXPERIMENTS = {
    "reports": Experiment(
        about="public reports about PyTorch's partitioner, and the same steps under remat",
        cases=(
            *grid(SIZES, BUDGETS, ("pytorch", "remat")),
            *grid((DEEP,), sides=("eager", "pytorch", "remat")),
            *grid((MASKS,), DROPPED, ("pytorch", "remat")),
        ),
        quick=grid((MASKS,), DROPPED, ("pytorch", "remat")),
        measure=measure_reports,
        summarise=summarise,
    ),
    "report-steps": Experiment(
        about="steps of issue 197838 at the peaks of PyTorch's plans, and below",
        cases=grid(SIZES, (0.35, 0.25, 0.15, 0.05)),
        quick=grid(list(SIZES)[:1], (0.05,)),
        measure=measure_steps,
    ),
}
