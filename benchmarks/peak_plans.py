"""Plans within a peak beside a sweep over byte budgets, which is how such budgets were planned before.

    python benchmarks/peak_plans.py [--only llama-7b,gpt2-small] [--cost roofline:h100] [--json FILE]

For each architecture of `architectures.py`, and for the small models of `models.py`: the peak of budget
1's plan and the least that the sweep reaches; at shares of the range between, the cost of the plan, its
proven gap, and the cost of the sweep's best at the same peak. As before, the sweep's plans run forward in
the order of the graph. `recomputed` and `gap` are shares of the cost of all nodes once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES
from machine import header
from models import ZOO, build
from rich.console import Console
from rich.table import Table

import remat
from remat.graph.forward_order import ForwardOrder
from remat.passes.core.state import Costs
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.units import Budget

RESULTS = Path(__file__).parent / "results" / "peak_plans.json"
SHARES = (0.75, 0.5, 0.25, 0.1)
#: What geometric means are taken over.
KINDS = {
    "transformers": (
        "llama-7b",
        "llama-70b",
        "gpt2-xl",
        "bert-large",
        "t5-large",
        "vit-huge",
        "mixtral-8x7b",
        "gemma2-9b",
        "whisper-medium",
        "swin-base",
    ),
    "small transformers": ("llama-small", "gpt2-small", "bert-small", "t5-small", "vit-small"),
    "convolutions": ("resnet-50", "resnet-101", "densenet-201", "unet"),
    "small convolutions": ("resnet-small",),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--cost", default="roofline:h100")
    parser.add_argument("--lower", default="inductor")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    data: dict[str, Any] = {}
    if only and options.json.exists():
        data = json.loads(options.json.read_text())["architectures"]
    for name in (*(f"{n}-small" for n in ZOO), *ARCHITECTURES):
        if only and name not in only:
            continue
        data[name] = architecture(name, options.cost, options.lower)
        print(json.dumps({name: data[name]}), flush=True)
        means = {
            kind: mean({n: data[n] for n in names if n in data}) for kind, names in KINDS.items()
        }
        gaps = [row["gap"] for found in data.values() for row in found["rows"]]
        report = {
            **header("peak_plans"),
            "architectures": data,
            "geometric_means": means,
            "median_gap": statistics.median(gaps),
            "largest_ratio": max(row["ratio"] for found in data.values() for row in found["rows"]),
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(table(data))


def architecture(name: str, cost: str, lower: Any) -> dict[str, Any]:
    model, args, kwargs = made(name)
    joint = remat.capture(model, args, kwargs, lower=lower)
    request = PlanRequest.of(cost=cost)
    started = time.process_time()
    with in_graph_order():
        before = Planner.of(joint, request)  # each side with its own, so that none helps the other
        top = before.peak(before.at(before.full_bytes))
        least = min(before.peak(d) for d in map(before.at, sorted(set(before.capacities()))))
        peaks = [int(least + share * (top - least)) for share in SHARES]
        swept = [before.swept(peak) for peak in peaks]
    sweep_s = time.process_time() - started
    once = sum(before.state.get(Costs(request.cost)))
    remat.plan(joint, 0.5, cost=cost)  # the process knows the operators afterwards
    started = time.perf_counter()
    remat.plan(joint, 0.5, cost=cost)
    ratio_s = time.perf_counter() - started
    rows = []
    for share, peak, old in zip(SHARES, peaks, swept, strict=True):
        assert old is not None
        begun = time.perf_counter()
        now = Planner.of(joint, request)
        started = time.perf_counter()
        new = now.decide(Budget(peak_bytes=peak))
        plan = now.finish(new, Budget(peak_bytes=peak))
        seconds = time.perf_counter() - started
        assert plan.peak_bytes <= peak
        rows.append(
            {
                "share": share,
                "peak_bytes": peak,
                "swept_cost": old.cost,
                "cost": plan.recompute_cost,
                "bound": plan.recompute_bound,
                "ratio": round(plan.recompute_cost / old.cost, 4) if old.cost else 1.0,
                "recomputed": round(plan.recompute_cost / once, 5),
                "gap": round(plan.gap / once, 5),
                "reached_bytes": plan.peak_bytes,
                "ordered": bool(plan.forward_order),
                "seconds": round(seconds, 2),
                "times_of_ratio": round((started - begun + seconds) / ratio_s, 1),
            }
        )
    now = Planner.of(joint, request)
    return {
        "nodes": len(joint.graph.nodes),
        "budget_1_peak_bytes": top,
        "budget_1_peak_bytes_now": now.peak(now.at(now.full_bytes)),
        "least_swept_bytes": least,
        "least_found_bytes": now.least_found,
        "least_possible_bytes": now.search.least_possible,
        "sweep_s": round(sweep_s, 2),
        "rows": rows,
    }


def made(name: str) -> tuple[Any, Any, Any]:
    """A model with the inputs of one step: at real size, or a small one, called ``NAME-small``."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]()
    step = build(name.removesuffix("-small"))
    return step.model, step.args, step.kwargs


@contextlib.contextmanager
def in_graph_order() -> Iterator[None]:
    """Plans run forward in the order of the graph, as they did before."""
    later = ForwardOrder.sorted
    ForwardOrder.sorted = lambda self, positions: sorted(positions)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ForwardOrder.sorted = later  # type: ignore[method-assign]


def mean(data: dict[str, Any]) -> float:
    """Geometric mean of the ratios; those below 0.1 count as 0.1."""
    ratios = [max(0.1, row["ratio"]) for found in data.values() for row in found["rows"]]
    if not ratios:
        return 1.0
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)


def table(data: dict[str, Any]) -> Table:
    shown = Table("architecture", "nodes", *(f"at {share}" for share in SHARES), "gaps", "slowest")
    for name, found in data.items():
        rows = found["rows"]
        slowest = max(row["seconds"] for row in rows)
        ratios = (f"{row['ratio']:.3f}" for row in rows)
        gaps = " ".join(f"{row['gap']:.2%}" for row in rows)
        shown.add_row(name, str(found["nodes"]), *ratios, gaps, f"{slowest:.1f} s")
    return shown


if __name__ == "__main__":
    main()
