"""Schedules of published graphs, and of drawn ones of the same family, beside what was published.

    python -m benchmarks.schedules [FOLDER] [--solver auto] [--shares 0.9,0.8,0.7] [--only n100,fcn]

FOLDER holds node-link files: the random layered graphs of MOCCASIN, Checkmate's training graphs. Without
it, graphs of the layered family are drawn. A budget is a share of the peak of the graph's own order,
rounded up; the figure is the increase of the summed cost over running everything once, in percent.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat
from benchmarks.machine import header
from remat.errors import BudgetError
from remat.plugins.registry import registry
from remat.solvers.run import run
from remat.solvers.schedule_problem import ScheduleProblem, evaluate_schedule, least_peak
from remat.testing.steps import layered

RESULTS = Path(__file__).parent / "results" / "schedules.json"

#: The best increase published, in percent, by a part of the file's name and the share: of Checkmate's
#: MILP (Jain et al. 2020), MOCCASIN (Bartan et al. 2023) and FastSA.
PUBLISHED: dict[str, dict[float, float | None]] = {
    "layered_n100": {0.9: 0.0, 0.8: 0.3, 0.7: 2.2},
    "layered_n250": {0.9: 0.0, 0.8: 0.0, 0.7: 2.6},
    "layered_n500": {0.9: 0.0, 0.8: 2.3, 0.7: None},
    "layered_n1000": {0.9: 0.4, 0.8: 2.5, 0.7: 7.4},
    "fcn_8": {0.9: 0.0, 0.8: 0.1, 0.7: 3.0},
    "ResNet50": {0.9: 0.1, 0.8: 0.3, 0.7: 0.8},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--shares", default="0.9,0.8,0.7")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shares = [float(share) for share in options.shares.split(",")]
    rows = []
    for name, problem in problems(options.folder):
        if options.only and not any(part in name for part in options.only.split(",")):
            continue
        for share in shares:
            rows.append(row(name, problem, share, options.solver))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    options.output.write_text(json.dumps({**header("schedules"), "rows": rows}, indent=1) + "\n")
    Console().print(table(rows))


def problems(folder: Path | None) -> list[tuple[str, ScheduleProblem]]:
    if folder is None:
        sizes = ((100, 0.27), (250, 0.43), (500, 0.36), (1000, 0.39))
        return [(f"drawn n{n}", layered(n, width=width, seed=n)) for n, width in sizes]
    loaded = [
        (path.stem, remat.load_instance(path).problem) for path in sorted(folder.glob("*.json"))
    ]
    return [(name, p) for name, p in loaded if isinstance(p, ScheduleProblem)]


def row(name: str, problem: ScheduleProblem, share: float, solver: str) -> dict[str, object]:
    given = evaluate_schedule(problem, range(len(problem)))
    capacity = math.ceil(share * given.peak_bytes)
    published = next((v for k, v in PUBLISHED.items() if k in name), {})
    found: dict[str, object] = {
        "graph": name,
        "nodes": len(problem),
        "share": share,
        "given_peak_bytes": given.peak_bytes,
        "published": published.get(share),
        "increase": None,
        "bound": 0.0,
    }
    started, processor = time.perf_counter(), time.process_time()
    decider = registry().solver(solver)
    try:
        schedule = run(decider, problem.within(capacity))
    except BudgetError as error:
        found["why"] = str(error)
        found["least_bytes"] = least_peak(problem)[0]
    else:
        found["increase"] = 100 * (schedule.cost / given.cost - 1)
        found["bound"] = 100 * (schedule.bound / given.cost - 1)
        found["peak_bytes"] = schedule.peak_bytes
        found["runs"] = len(schedule.sequence)
    found["seconds"] = time.perf_counter() - started
    found["processor_s"] = time.process_time() - processor
    return found


def table(rows: list[dict[str, object]]) -> Table:
    shown = Table("graph", "nodes", "budget", "increase", "bound", "published", "seconds")
    for r in rows:
        increase, published = r["increase"], r["published"]
        shown.add_row(
            str(r["graph"])[:40],
            str(r["nodes"]),
            f"{r['share']:.0%}",
            "infeasible" if increase is None else f"{increase:.2f} %",
            f"{r['bound']:.2f} %",
            "–" if published is None else f"{published:.1f} %",
            f"{r['seconds']:.1f}",
        )
    return shown


if __name__ == "__main__":
    main()
