"""Plans within a peak that may pack and offload, beside keeping and recomputing alone.

    python benchmarks/ways.py [--only bert-large,resnet-50] [--cost roofline:h100] [--offload 25GB/s] [--json FILE]
    python benchmarks/ways.py --offload "" --pack float8 [--only …]
    python benchmarks/ways.py --small 2000

For each architecture of `architectures.py` that is asked for, at shares of the range of its peaks: the time that
a plan adds to the step with ways and without; what is proven that any plan with ways adds; offloading everything, packing
everything, and the most bytes per second first until it fits, by the same evaluator; and processor seconds of planning. With
``--small``: random small problems, the search and its local moves alone against every decision.
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
from remat.solvers import ways_search
from remat.solvers.ways_bare import search_of
from remat.solvers.ways_lagrangian import Found
from remat.solvers.ways_problem import OFFLOADED
from remat.units import Budget

RESULTS = Path(__file__).parent / "results" / "ways.json"
SHARES = (0.5, 0.25, 0.1)
COST = "roofline:h100"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--cost", default=COST)
    parser.add_argument("--offload", default="25GB/s")
    parser.add_argument("--pack", default="", help="pairs, separated by commas")
    parser.add_argument("--small", type=int, default=0, help="only so many small problems")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = json.loads(options.json.read_text()) if options.json.exists() else {}
    data = report.setdefault("architectures", {})
    if options.small:
        report["small"] = small(options.small)
    else:
        only = [name for name in options.only.split(",") if name]
        for name in only or ARCHITECTURES:
            other = options.cost if options.cost != COST else ""
            key = " ".join(filter(None, (name, options.offload, options.pack, other)))
            data[key] = architecture(name, options.cost, options.offload, options.pack)
            print(json.dumps({key: data[key]}), flush=True)
            write(options.json, report)
    write(options.json, report)


def write(path: Path, report: dict[str, Any]) -> None:
    """The report with what all its rows together come to."""
    rows = [
        row
        for key, found in report["architectures"].items()
        for row in found["rows"]
        if not found.get("packed")
    ]
    ratios = [max(row["ratio"], 1e-3) for row in rows if row["without"]]
    if ratios:
        means = math.exp(sum(map(math.log, ratios)) / len(ratios))
        report["geometric_mean_of_added_time"] = round(means, 4)
        report["largest_ratio"] = max(ratios)
    path.write_text(json.dumps({**header("ways"), **report}, indent=1) + "\n")


def architecture(name: str, cost: str, offload: str, pack: str) -> dict[str, Any]:
    joint = remat.capture(*ARCHITECTURES[name](), lower="eager")
    ways = {k: v for k, v in {"offload": offload, "pack": pack}.items() if v}
    rows = []
    for share in SHARES:
        started = time.process_time()
        without = remat.plan(joint, remat.Peak(share), cost=cost)
        without_s = time.process_time() - started
        started = time.process_time()
        budget = Budget(peak_share=share)
        request = PlanRequest.of(budget=remat.Peak(share), cost=cost, **ways)  # type: ignore[arg-type]
        planner = Planner.of(joint, request)
        plan = planner.finish(planner.decide(budget), budget)
        with_s = time.process_time() - started
        added = plan.recompute_cost + plan.ways_cost
        assert added <= without.recompute_cost
        beside = others(planner, budget)
        assert all(added <= f.cost for f in beside.values() if not f.over)
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
                "waited": plan.waited,
                "packing": plan.ways_cost - plan.waited,
                "offloaded_bytes": plan.host_bytes,
                "packed_bytes": sum(way.nbytes for way in plan.ways if way.pair),
                **{name: told(found) for name, found in beside.items()},
                "without_s": round(without_s, 1),
                "with_s": round(with_s, 1),
            }
        )
    return {"nodes": len(joint.graph.nodes), "packed": pack, "rows": rows}


def others(planner: Planner, budget: Budget) -> dict[str, Found]:
    """Everything saved and offloaded, everything saved and packed, and the most bytes per second first until it fits."""
    peaks = planner.peaks
    search, problem = peaks.ways._searching(peaks._peak_of(budget)), peaks.ways._problem()
    kept = search.found(planner.saved_of(planner.cheapest), {})
    idle = kept.followed.idle
    everything = {
        "everything": {v: OFFLOADED for v in idle if problem.send[v] >= 0},
        "everything_packed": {v: 0 for v in idle if problem.packings[v]},
    }
    found = {
        name: search.evaluated(kept.saved, kept.followed, ways)
        for name, ways in everything.items()
        if ways
    }
    return {**found, "greedy": search.greedy(kept)}


def told(found: Found) -> int | None:
    """What it adds; None where it does not fit."""
    return None if found.over else found.cost


def small(count: int) -> dict[str, Any]:
    """How often the search, and its local moves alone, are as good as the best of all decisions."""
    from remat.solvers.ways_bare import solve_ways
    from remat.testing.ways import cheapest, drawn

    equal = local = 0
    whole = ways_search.WHOLE
    for seed in range(count):
        problem = drawn(seed)
        best = cheapest(problem)
        equal += solve_ways(problem).cost == best
        ways_search.WHOLE = 0
        found = search_of(problem).best([range(len(problem.step) // 2)])
        ways_search.WHOLE = whole
        local += not found.over and found.cost == best
    return {"problems": count, "equal": equal, "equal_by_local_search_alone": local}


if __name__ == "__main__":
    main()
