"""Plans without OR-Tools, PuLP and the compiled kernel, as in a training image, beside plans with all three.

Each model is planned in a process of each kind, at ratios of saved bytes, and at the peaks that `remat.Peak` of a ratio stands for with
all three. ``cost_ratio`` is the cost without them divided by the cost with them. ``gap`` is what the plan itself says that may be missing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, in_process, silence
from benchmarks.figures import geometric_mean, ratio_of
from benchmarks.workloads import COMPILED

NINE = ("llama", "resnet", "gpt2-long", "bert", "vit", "t5", "unet", "dit", "moe")
BUDGETS = (0.5, 0.2, "peak:0.5", "peak:0.2")
#: What such an image lacks.
LACKING = ("ortools", "pulp", "highspy", "remat.solvers._kernel")
#: Costs below this count as this, in the cost model's unit.
FLOOR = 10**6


def planned(name: str, budgets: Sequence[Any], lacking: Sequence[str]) -> Iterator[Row]:
    """Plans of one model, in a process that lacks some modules."""
    silence()
    sys.modules.update(dict.fromkeys(lacking))  # type: ignore[arg-type] # their import fails
    work = COMPILED[name]
    joint = remat.capture(work.build(), (), work.batches(1)[0])
    for budget in budgets:
        asked = remat.Peak(float(budget[5:])) if isinstance(budget, str) else budget
        start = time.perf_counter()
        try:
            plan = remat.plan(joint, asked)
        except remat.RematError as error:
            yield {"message": str(error)}
            continue
        yield {
            "cost": plan.recompute_cost,
            "gap": plan.gap,
            "limit": plan.peak_limit,
            "saved_bytes": plan.saved_bytes,
            "peak_bytes": plan.peak_bytes,
            "seconds": round(time.perf_counter() - start, 2),
        }


def measure(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    budgets = [case.budget for case in cases]
    full = list(in_process(planned, name, budgets, ()))
    # A ratio of the peak stands for other bytes if another least peak is found.
    asked = [
        remat.Peak(row["limit"]) if isinstance(budget, str) else budget
        for budget, row in zip(budgets, full, strict=True)
    ]
    bare = in_process(planned, name, asked, LACKING)
    for case, has, lacks in zip(cases, full, bare, strict=True):
        ratio = None
        if "cost" in lacks:
            ratio = ratio_of(max(lacks["cost"], FLOOR), max(has["cost"], FLOOR))
        yield case.row(cost_ratio=ratio, without=lacks, **{"with": has})


def summarise(rows: list[Row]) -> Row:
    found: Row = {"plans": len(rows)}
    for kind, of_peak in (("saved", False), ("peak", True)):
        own = [r for r in rows if isinstance(r["budget"], str) is of_peak]
        ratios = [r["cost_ratio"] for r in own if r["cost_ratio"] is not None]
        found[f"{kind}_refused"] = len(own) - len(ratios)
        if ratios:
            found[f"{kind}_mean"], found[f"{kind}_worst"] = geometric_mean(ratios), max(ratios)
            found[f"{kind}_over_5_percent"] = sum(ratio > 1.05 for ratio in ratios)
    return found


EXPERIMENTS = {
    "bare": Experiment(
        about="plans without OR-Tools, PuLP and the kernel, beside plans with them",
        cases=grid(NINE, BUDGETS),
        quick=grid(("unet",), (0.5, "peak:0.5")),
        measure=measure,
        summarise=summarise,
    )
}
