"""Steps without a budget: ``torch.compile(model, backend="remat")`` against plain Inductor.

Every model is compiled by plain Inductor, by plain Inductor again, and by remat. They train in turn, as in the benchmark
``step``; its sides, ratios and peaks are those of this benchmark. The ratio of plain Inductor to itself is the noise.
"""

from __future__ import annotations

from functools import partial

from benchmarks.experiment import KEPT_MEMORY, Experiment, Row, grid
from benchmarks.figures import above, geometric_mean, grouped
from benchmarks.step import measure
from benchmarks.workloads import WITHOUT_BUDGET

#: Largest ratio of a compiled peak; of a step's time, beyond the noise; and of all steps' times, as a geometric mean.
LIMITS = {"worst_peak": 1.01, "worst_step_beyond_noise": 1.03, "mean_step": 1.0}
SIDES = ("pytorch", "pytorch again", "remat")


def summarise(rows: list[Row]) -> Row:
    """The worst and mean ratios of remat's steps and peaks, and the mean noise."""
    sides = grouped(rows, "side")
    ours = sides["remat"]
    noise = {r["workload"]: abs(r["to_pytorch"][1] - 1) for r in sides["pytorch again"]}
    steps = {r["workload"]: r["to_pytorch"][1] for r in ours}
    return {
        "limits": LIMITS,
        "worst_peak": max(r["peak_to_pytorch"] for r in ours),
        "mean_peak": round(geometric_mean(r["peak_to_pytorch"] for r in ours), 4),
        "worst_step_beyond_noise": round(max(steps[name] - noise[name] for name in steps), 4),
        "mean_step": round(geometric_mean(steps.values()), 4),
        "mean_noise": round(sum(noise.values()) / len(noise), 4),
        "losses_apart": [
            row["workload"]
            for row in sides["model"]
            if not row["largest_loss_difference"] <= row["loss_difference_allowed"]
        ],
    }


def missed(summary: Row) -> list[str]:
    apart = [f"losses of {name} are apart" for name in summary["losses_apart"]]
    return above(summary, LIMITS) + apart


EXPERIMENTS = {
    "default": Experiment(
        about="steps without a budget, beside plain Inductor's",
        cases=grid(WITHOUT_BUDGET, (1.0,), SIDES),
        quick=grid(("gru",), (1.0,), SIDES),
        measure=partial(measure, steps=40),
        summarise=summarise,
        missed=missed,
        environment=KEPT_MEMORY,
    ),
}
