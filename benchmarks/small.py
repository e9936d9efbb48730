"""Small programs under budgets on the peak, in both lowerings: does each run, and how good is the estimate?

A program is refused only with a budget that then runs. Gradients are compared with those of eager PyTorch. The estimate and
the compiled peak are those of the first plan that is compiled; a search within a peak corrects itself afterwards.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import remat
from benchmarks.experiment import Case, Experiment, Row, grid
from benchmarks.figures import above, grouped
from remat.errors import BudgetError
from remat.integrations import budget_loop
from tests.small_programs import NETS, OPERATORS, PROGRAMS

#: Budgets: two ratios of the peak, and two shares of the peak of budget 1, in bytes.
BUDGETS = ("peak:1.0", "peak:0.0", "0.9 of budget 1", "0.5 of budget 1")
LIMITS = {"crashed": 0, "wrong_gradients": 0, "worst_estimate_off": 0.1, "mean_estimate_off": 0.03}
#: Largest difference from eager PyTorch's gradients: float32, and 16-bit types.
TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 5e-2}


def step(program: Any, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[remat.Plan]]:
    """Gradients of a step, and all plans that were compiled for it, the first one first."""
    torch._dynamo.reset()
    run, tensors = program
    made: list[remat.Plan] = []
    replans = budget_loop.plans_again

    def observed(planned: Any, known: Any) -> tuple[bool, str]:
        made.append(planned.plan)
        return replans(planned, known)

    compiled = torch.compile(run, backend="remat", options=options)
    with mock.patch.object(budget_loop, "plans_again", observed):
        gradients = torch.autograd.grad(compiled(), tensors, allow_unused=True)
    return [g for g in gradients if g is not None], made or [remat.plans()[-1]]


def measure_small(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    program = PROGRAMS[name]()
    run, tensors = program
    right = [g for g in torch.autograd.grad(run(), tensors, allow_unused=True) if g is not None]
    for lower in dict.fromkeys(case.side for case in cases):
        _, (plan, *_) = step(program, {"lower": lower})
        for case in (c for c in cases if c.side == lower):
            budget, outcome = case.budget, "runs"
            if " of " in budget:
                budget = int(float(budget.split()[0]) * plan.peak_bytes)
            try:
                found, made = step(program, {"lower": lower, "budget": budget})
            except Exception as error:
                outcome = f"crashed: {type(error).__name__}: {error}"[:200]
                named = re.search(r"give budget=(\d+)", str(error))
                if not isinstance(error, BudgetError) or named is None:
                    yield case.row(outcome=outcome)
                    continue
                outcome = "refused, and runs within the budget that the error names"
                found, made = step(program, {"lower": lower, "budget": int(named[1])})
            # Dropout draws other numbers than eager PyTorch's.
            far = 0.0 if name == "encoder" else distance(found, right)
            first = made[0]
            yield case.row(
                outcome=outcome,
                estimated=first.estimated_peak_bytes if lower == "inductor" else None,
                compiled=first.peak_bytes,
                plans=len(made),
                gradient=far,
                wrong=not far <= TOLERANCE[tensors[0].dtype],  # NaN is wrong, too
            )


def distance(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Largest difference of a gradient, as a share of the largest gradient: gradients through a norm may be about 0."""
    largest = torch.stack([b.abs().float().norm() for b in right]).max()
    far = torch.stack([(a - b).abs().float().norm() for a, b in zip(found, right, strict=True)])
    return float(far.max() / largest)  # NaN if one of them is


def summarise_small(rows: list[Row]) -> Row:
    estimates = [
        abs(row["estimated"] / row["compiled"] - 1) for row in rows if row.get("estimated")
    ]
    outcomes = {name: len(own) for name, own in grouped(rows, "outcome").items()}
    return {
        "outcomes": {k: n for k, n in sorted(outcomes.items()) if not k.startswith("crashed")},
        "crashed": sum(n for k, n in outcomes.items() if k.startswith("crashed")),
        "wrong_gradients": sum(row.get("wrong", False) for row in rows),
        "estimates": len(estimates),
        "mean_estimate_off": statistics.fmean(estimates),
        "worst_estimate_off": max(estimates),
    }


EXPERIMENTS = {
    "small": Experiment(
        about="small programs under budgets on the peak: what runs, and how near the estimate is",
        cases=grid((*OPERATORS, *NETS), BUDGETS, ("inductor", "eager")),
        quick=grid(("conv1d", "amax, bf16"), BUDGETS[1::2], ("inductor", "eager")),
        measure=measure_small,
        summarise=summarise_small,
        missed=lambda summary: above(summary, LIMITS),
        environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"},
    ),
}
