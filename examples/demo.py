"""The demo: a Llama's training step before and after remat, planned, compiled, run and measured.

Everything is real but small: a `transformers` Llama on the CPU, one step of forward and backward. Without
remat it is what plain ``torch.compile`` makes of it, or eager PyTorch where there is no C++ compiler. The
exit code is 0 only if the step under the plan agrees with eager PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import llama
from rich.console import Console
from rich.rule import Rule
from torch import nn

import remat
from remat.cli.tables import new_table, plan_table
from remat.running.measure import measure_step
from remat.units import format_bytes

TOLERANCE = 1e-4
#: Timed steps of each kind; they alternate, so that noise meets both alike.
REPEATS = 7
PS_PER_MS = 10**9
#: The cost model that the backend has by default: for the device of the tensors, a CPU here.
COST = "auto"
#: The model of the demo, for the command.
MODEL = "examples/models.py:llama"
SOLVERS = ("greedy", "dp", "lagrangian", "auto")


class Loss(nn.Module):
    """A model of which training needs the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**kwargs).loss
        return loss


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A step that was measured.

    Attributes:
        label: what ran.
        peak_bytes: most bytes alive at once, as the allocator tells it; parameters included.
        times_ms: milliseconds of forward and backward, of each run.
    """

    label: str
    peak_bytes: int
    times_ms: list[float]

    @property
    def ms(self) -> float:
        """The median."""
        return statistics.median(self.times_ms)

    @property
    def quartiles(self) -> str:
        low, _, high = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return f"{low:.1f}–{high:.1f} ms"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="layers of the Llama (4)")
    parser.add_argument("--hidden", type=int, default=256, help="its width (256)")
    parser.add_argument("--seq", type=int, default=256, help="tokens of each of 4 texts (256)")
    parser.add_argument(
        "--budget", default="95MiB", help="memory of the step at its peak (95MiB), or peak:0.5"
    )
    parser.add_argument(
        "--picture", type=Path, default=Path("remat-demo.svg"), help="where to draw"
    )
    parser.add_argument(
        "--lower",
        choices=("inductor", "eager"),
        default="inductor" if has_compiler() else "eager",
        help="inductor where there is a C++ compiler, else eager",
    )
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # of libraries; the demo is for reading
    logging.disable(logging.WARNING)
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if asked.lower == "eager":
        out.print("(no Inductor in this run: the planned graphs run as they are)")

    size = {"layers": asked.layers, "hidden": asked.hidden, "seq": asked.seq}
    llama_model, args, kwargs = llama(device="cpu", **size)
    model = Loss(llama_model)
    name = f"Llama, {asked.layers} layers, width {asked.hidden}, {asked.seq} tokens"
    count = sum(p.numel() for p in model.parameters())

    out.print(Rule("1  Capture the training step, without computing a number", align="left"))
    start = time.perf_counter()
    joint = remat.capture(model, args, kwargs, lower=asked.lower)
    joint = dataclasses.replace(joint, name=name)
    out.print(
        f"LlamaForCausalLM, {asked.layers} layers, {count / 1e6:.1f} M parameters: forward and backward "
        f"are one graph of {len(joint.graph.nodes):,} nodes, traced in {time.perf_counter() - start:.1f} s\n"
    )

    out.print(Rule(f"2  Plan it within {asked.budget}", align="left"))
    plan = remat.plan(joint, budget=asked.budget, cost=COST)
    out.print(plan_table(plan, "", plan.cost))
    if plan.before_after.without_cost > plan.step_cost:
        out.print(
            "The step without remat recomputes a little too, so the plan adds less time than it recomputes."
        )
    plan.plot(asked.picture)
    out.print(f"drawn: {asked.picture.resolve()}\n")

    out.print(Rule("3  Let solvers compete, scored by one yardstick", align="left"))
    comparison = remat.compare(joint, SOLVERS, budgets=(asked.budget, 0.3), cost=COST)
    out.print(f"{comparison}\n")
    out.print(
        "* least recompute cost of these solvers at the budget; gap: the cost above a proven bound\n"
    )

    out.print(Rule("4  Compile it, run it, measure it", align="left"))
    worst = run(out, model, kwargs, budget=asked.budget, lower=asked.lower)
    if not worst <= TOLERANCE:
        out.print(
            f"\nThe step differs from eager by {worst:.1e} > {TOLERANCE:g}.", style="bold red"
        )
        return 1
    out.print(f"\nThe step agrees with eager PyTorch: {worst:.1e} ≤ {TOLERANCE:g}.\n")

    # No environment is active after make demo.
    command, pip = (os.path.relpath(Path(sys.executable).with_name(n)) for n in ("remat", "pip"))
    out.print(Rule("What to do next", align="left"))
    out.print(
        f"a page to click through: {command} explain {MODEL} --budget peak:0.3 --html step.html   "
        f"({pip} install bokeh)\n"
        f"every budget at once:    {command} frontier {MODEL} --plot frontier.svg\n"
        f"your own model:          {command} plan train.py:build --budget 40GiB   "
        "(build() returns model, args, kwargs)"
    )
    return 0


def run(
    out: Console, model: nn.Module, kwargs: dict[str, Any], *, budget: str, lower: str
) -> float:
    """Runs and measures the step without and with remat; the greatest relative difference from eager."""
    torch.compiler.reset()
    before: Any = torch.compile(model) if lower == "inductor" else model
    options = {"budget": budget, "cost": COST, "lower": lower}
    after = torch.compile(model, backend="remat", options=options)
    loss, grads = step(model, model, kwargs)
    found = []
    names = (
        "torch.compile" if lower == "inductor" else "eager PyTorch",
        f"remat, budget {budget}",
    )
    for label, call in zip(names, (before, after), strict=True):
        start = time.perf_counter()
        found.append(step(model, call, kwargs))
        out.print(f"{label}: compiled and run in {time.perf_counter() - start:.1f} s")
    plan = remat.plans()[-1]
    show(out, [*measured(model, dict(zip(names, (before, after), strict=True)), kwargs)], plan)
    own_loss, own_grads = found[1]
    return max(
        ((own_loss - loss).abs() / loss.abs()).item(),
        *(((own_grads[k] - g).norm() / g.norm().clamp_min(1e-30)).item() for k, g in grads.items()),
    )


def measured(model: nn.Module, calls: dict[str, Any], kwargs: dict[str, Any]) -> list[Ran]:
    """Peak and times of steps of each."""
    held = [*model.parameters(), *model.buffers()]
    model.zero_grad()
    peaks = {
        name: measure_step(call, (), kwargs, resident=held, by="allocator").peak_bytes
        for name, call in calls.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            model.zero_grad()
            start = time.perf_counter()
            call(**kwargs).backward()
            times[name].append(1e3 * (time.perf_counter() - start))
    return [Ran(label=name, peak_bytes=peaks[name], times_ms=times[name]) for name in calls]


def show(out: Console, ran: list[Ran], plan: remat.Plan) -> None:
    """Both steps as measured, then as planned: for the same device, in the same units."""
    before, after = ran
    both = plan.before_after
    modelled = (
        both.without_cost / PS_PER_MS,
        (both.step_cost + both.recompute_cost + both.exposed_time) / PS_PER_MS,
    )
    expected = plan.without_estimated_bytes or plan.without_peak_bytes
    table = new_table()
    for name in ("", before.label, after.label, "change"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    peaks = {
        "peak, measured": (before.peak_bytes, after.peak_bytes),
        "peak, planned": (expected, plan.peak_bytes),
    }
    for name, (old, new) in peaks.items():
        table.add_row(name, format_bytes(old), format_bytes(new), f"{new / old - 1:+.0%}")
    steps = {"step, median": (before.ms, after.ms), "step, modelled": modelled}
    for name, (old_ms, new_ms) in steps.items():
        more = f"{new_ms / old_ms - 1:+.1%}, {new_ms - old_ms:+.1f} ms"
        table.add_row(name, f"{old_ms:.1f} ms", f"{new_ms:.1f} ms", more)
        if name == "step, median":
            table.add_row("  quartiles", before.quartiles, after.quartiles, "")
    out.print(table)
    planned = "Planned peaks are simulated operator by operator, as in section 2."
    if plan.lower == "inductor":
        planned = (
            f"Planned peaks: remat computed its own from the code that Inductor generated, and estimated that of "
            f"{before.label}. Section 2 simulates the step operator by operator, so the peaks and the plan there differ."
        )
    out.print(
        f"Measured: {REPEATS} steps of each, in turns; other load slows and scatters them. "
        f"Modelled: for an idle CPU, by {plan.cost}.\n{planned}"
    )


def step(
    model: nn.Module, call: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    model.zero_grad()
    loss = call(**kwargs)
    loss.backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return loss.detach().clone(), grads


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler here."""
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl")))


if __name__ == "__main__":
    sys.exit(main())
