"""Plans within a peak, at real size: prices on moments beside a sweep over byte budgets.

    python benchmarks/peak_plans.py [--only llama-7b,unet] [--costs roofline] [--json FILE]

For each architecture of `architectures.py`: the peak of budget 1's plan and the least that the sweep
reaches; at shares of the range between, the cost of the plan and that of the sweep's best at the same
peak, which is how such budgets were planned before. `recomputed` is the cost of what runs twice as a share
of the cost of all nodes once.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES
from machine import header
from rich.console import Console
from rich.table import Table

import remat
from remat.passes.core.state import Costs
from remat.planning.planner import Decided, Planner
from remat.planning.request import PlanRequest
from remat.units import Budget

RESULTS = Path(__file__).parent / "results" / "peak_plans.json"
SHARES = (0.75, 0.5, 0.25, 0.1)


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
    for name in ARCHITECTURES:
        if only and name not in only:
            continue
        data[name] = architecture(name, options.cost, options.lower)
        print(json.dumps({name: data[name]}), flush=True)
        report = {**header("peak_plans"), "architectures": data, "geometric_mean": mean(data)}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(table(data))


def architecture(name: str, cost: str, lower: Any) -> dict[str, Any]:
    model, args, kwargs = ARCHITECTURES[name]()
    joint = remat.capture(model, args, kwargs, lower=lower)
    request = PlanRequest.of(cost=cost)
    before = Planner.of(joint, request)  # each side with its own, so that none helps the other
    top = before.peak(before.decide(Budget.parse(1.0)))
    started = time.process_time()
    swept = [(before.peak(d), d) for d in map(before.at, before.capacities())]
    sweep_s = time.process_time() - started
    least = min(peak for peak, _ in swept)
    once = sum(before.state.get(Costs(request.cost)))
    rows = []
    for share in SHARES:
        peak = int(least + share * (top - least))
        old: Decided | None = before._swept(peak, before.peak)
        now = Planner.of(joint, request)
        started = time.process_time()
        new = now.decide(Budget(peak_bytes=peak))
        seconds = time.process_time() - started
        assert old is not None
        rows.append(
            {
                "share": share,
                "peak_bytes": peak,
                "swept_cost": old.cost,
                "cost": new.cost,
                "ratio": round(new.cost / old.cost, 4) if old.cost else 1.0,
                "recomputed": round(new.cost / once, 5),
                "reached_bytes": now.peak(new),
                "seconds": round(seconds, 2),
            }
        )
    now = Planner.of(joint, request)
    reached = now.peak(now._least_peak)
    return {
        "nodes": len(joint.graph.nodes),
        "budget_1_peak_bytes": top,
        "least_swept_bytes": least,
        "least_reached_bytes": min(reached, least),
        "least_possible_bytes": now._peak_search.least_possible,
        "sweep_s": round(sweep_s, 2),
        "rows": rows,
    }


def mean(data: dict[str, Any]) -> float:
    """Geometric mean of the ratios; those below 0.1 count as 0.1."""
    ratios = [max(0.1, row["ratio"]) for found in data.values() for row in found["rows"]]
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)


def table(data: dict[str, Any]) -> Table:
    shown = Table("architecture", "nodes", *(f"at {share}" for share in SHARES), "slowest")
    for name, found in data.items():
        rows = found["rows"]
        slowest = max(row["seconds"] for row in rows)
        ratios = (f"{row['ratio']:.3f}" for row in rows)
        shown.add_row(name, str(found["nodes"]), *ratios, f"{slowest:.1f} s")
    return shown


if __name__ == "__main__":
    main()
