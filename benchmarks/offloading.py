"""Plans within a peak that may offload, beside keeping and recomputing alone.

    python benchmarks/offloading.py [--only bert-large,resnet-50] [--cost roofline:h100] [--offload 25GB/s] [--json FILE]

For each architecture of `architectures.py`, at shares of the range of its peaks: the time that a plan adds to
the step with offloading and without, and a proven bound on that of any plan that offloads. Beside it, by the same
evaluator: offloading everything, and the most bytes per second first until it fits. Last, processor seconds of planning.
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

import remat
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.solvers.offload_prices import OffloadChoice
from remat.units import Budget

RESULTS = Path(__file__).parent / "results" / "offloading.json"
SHARES = (0.5, 0.25, 0.1)
COST = "roofline:h100"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--cost", default=COST)
    parser.add_argument("--offload", default="25GB/s")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = json.loads(options.json.read_text()) if options.json.exists() else {}
    data = report.setdefault("architectures", {})
    only = [name for name in options.only.split(",") if name]
    for name in only or ARCHITECTURES:
        other = options.cost if options.cost != COST else ""
        key = " ".join(filter(None, (name, options.offload, other)))
        data[key] = architecture(name, options.cost, options.offload)
        print(json.dumps({key: data[key]}), flush=True)
        write(options.json, report)


def write(path: Path, report: dict[str, Any]) -> None:
    """The report with a summary of all its rows."""
    rows = [row for found in report["architectures"].values() for row in found["rows"]]
    ratios = [max(row["ratio"], 1e-3) for row in rows if row["without"]]
    if ratios:
        means = math.exp(sum(map(math.log, ratios)) / len(ratios))
        report["geometric_mean_of_added_time"] = round(means, 4)
        report["largest_ratio"] = max(ratios)
    path.write_text(json.dumps({**header("offloading"), **report}, indent=1) + "\n")


def architecture(name: str, cost: str, offload: str) -> dict[str, Any]:
    joint = remat.capture(*ARCHITECTURES[name](), lower="eager")
    rows = []
    for share in SHARES:
        started = time.process_time()
        without = remat.plan(joint, remat.Peak(share), cost=cost)
        without_s = time.process_time() - started
        started = time.process_time()
        budget = Budget(peak_share=share)
        request = PlanRequest.of(budget=remat.Peak(share), cost=cost, offload=offload)
        planner = Planner.of(joint, request)
        plan = planner.finish(planner.decide(budget), budget)
        with_s = time.process_time() - started
        added = plan.recompute_cost + plan.exposed_time
        assert added <= without.recompute_cost
        others = baselines(planner, budget)
        assert all(added <= choice.cost for choice in others.values() if not choice.over)
        rows.append(
            {
                "share": share,
                "peak_bytes": plan.peak_bytes,
                "without_peak_bytes": without.peak_bytes,
                "step": plan.step_cost,
                "without": without.recompute_cost,
                "with": added,
                "bound": plan.recompute_bound,
                "ratio": round(added / without.recompute_cost, 4)
                if without.recompute_cost
                else 1.0,
                "exposed_time": plan.exposed_time,
                "offloaded_bytes": plan.host_bytes,
                **{name: None if c.over else c.cost for name, c in others.items()},
                "without_s": round(without_s, 1),
                "with_s": round(with_s, 1),
            }
        )
    return {"nodes": len(joint.graph.nodes), "rows": rows}


def baselines(planner: Planner, budget: Budget) -> dict[str, OffloadChoice]:
    """Everything saved and offloaded, and the most bytes per second first until it fits."""
    peak_bytes = planner.limit_of(budget).peak_bytes
    assert peak_bytes is not None
    search = planner.offloading.search_within(peak_bytes)
    kept = search.choice(planner.cheapest.saved, ())
    everything = filter(search.may_offload, kept.schedule.idle)
    return {
        "everything": search.evaluated(kept.saved, kept.schedule, everything),
        "greedy": search.greedy(kept),
    }


if __name__ == "__main__":
    main()
