"""Memory of steps that Inductor compiled: what was expected, what is known of the code, and what was allocated.

    python benchmarks/compiled_memory.py [--only llama,resnet] [--json FILE]

For each model of `models.py` and each budget: the simulated peak of the plan, the one that was expected of the
compiled step before it was compiled, the one that is known after, and the peak of the allocator; bytes held
from forward to backward by the plan, and by what autograd was given. Then `Peak` budgets in bytes between the
least and the highest of those peaks, and `Peak(share)` from 1 to 0.
"""

from __future__ import annotations

import argparse
import json
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from machine import header
from models import ZOO, build
from rich.console import Console
from rich.table import Table

import remat
from remat.errors import RematError
from remat.running.measure import measure_held, measure_step

RESULTS = Path(__file__).parent / "results" / "compiled_memory.json"
BUDGETS = (1.0, 0.5, 0.2, 0.1)
#: Places of `Peak` budgets between the least and the highest peak of the cells above.
BETWEEN = (0.75, 0.5, 0.25)
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    data: dict[str, Any] = {}
    if options.json.exists():
        data = json.loads(options.json.read_text())["models"]
    warnings.simplefilter("ignore")
    for name in only or ZOO:
        data[name] = model(name)
        print(json.dumps({name: data[name]}), flush=True)
        report = {**header("compiled_memory"), "models": data, **summary(data)}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(table(data))


def model(name: str) -> dict[str, Any]:
    cells = [cell(name, budget) for budget in BUDGETS]
    low = min(c["allocated"] for c in cells)
    high = max(c["allocated"] for c in cells)
    peaks = [int(low + share * (high - low)) for share in BETWEEN]
    held = []
    for peak in peaks:
        try:
            held.append(cell(name, remat.Peak(peak)))
        except Exception as error:  # Dynamo wraps what a backend raises
            if not isinstance(error, RematError) and "BudgetError" not in str(error):
                raise
            held.append({"budget": f"peak:{peak}", "refused": str(error)[:400]})
    return {
        "budgets": cells,
        "peaks": held,
        "falling": [cell(name, remat.Peak(share)) for share in SHARES],
    }


def cell(name: str, budget: Any) -> dict[str, Any]:
    """One model under one budget, compiled by Inductor."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = build(name)
    before = len(remat.plans())
    compiled = torch.compile(step.model, backend="remat", options={"budget": budget})
    allocated = measure_step(compiled, step.args, step.kwargs, by="allocator").peak_bytes
    plan = remat.plans()[-1]
    assert len(remat.plans()) > before
    expected = plan.predicted_peak_bytes
    return {
        "budget": str(budget) if isinstance(budget, float) else plan.budget,
        "simulated": plan.planned_peak_bytes,
        "expected": expected,
        "known": plan.peak_bytes,
        "allocated": allocated,
        "expected_off": round(expected / allocated - 1, 5),
        "known_off": round(plan.peak_bytes / allocated - 1, 5),
        "planned_saved": plan.planned_saved_bytes,
        "saved": plan.saved_bytes,
        "held": measure_held(compiled, step.args, step.kwargs),
        "capacity": plan.capacity,
    }


def summary(data: dict[str, Any]) -> dict[str, Any]:
    cells = [c for found in data.values() for c in found["budgets"]]
    peaks = [c for found in data.values() for c in found["peaks"]]
    limits = [int(c["budget"].removeprefix("peak:").removesuffix("B")) for c in peaks]
    rises = []
    for found in data.values():
        fall = [c["allocated"] for c in found["falling"]]
        rises.append(max(b / a - 1 for a, b in pairwise(fall)))
    return {
        "largest_expected_off": max(abs(c["expected_off"]) for c in cells),
        "largest_known_off": max(abs(c["known_off"]) for c in cells),
        "held_equal": f"{sum(c['held'] == c['saved'] for c in cells)} of {len(cells)}",
        "held_within": f"{sum(c['held'] <= c['capacity'] for c in cells)} of {len(cells)}",
        "peaks_held": sum(
            c.get("allocated", limit + 1) <= limit for c, limit in zip(peaks, limits, strict=True)
        ),
        "peaks_refused": sum("refused" in c for c in peaks),
        "peaks": len(peaks),
        "largest_rise": round(max(rises), 5),
    }


def table(data: dict[str, Any]) -> Table:
    shown = Table("model", "budget", "allocated", "simulated", "expected", "known", "held / saved")
    for name, found in data.items():
        for c in (*found["budgets"], *found["peaks"], *found["falling"]):
            if "refused" in c:
                shown.add_row(name, c["budget"], "refused")
                continue
            shown.add_row(
                name,
                c["budget"],
                f"{c['allocated']:,}",
                f"{c['simulated'] / c['allocated'] - 1:+.1%}",
                f"{c['expected_off']:+.1%}",
                f"{c['known_off']:+.2%}",
                f"{c['held']:,} / {c['saved']:,}",
            )
    return shown


if __name__ == "__main__":
    main()
