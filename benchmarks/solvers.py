"""Knapsack solvers side by side: ours and their peers, on one grid, by one yardstick.

Families of Pisinger (2005) over R = 10^3, 10^5, 10^7 and n = 50, 300, 1,000, 10,000 at several
seeds and capacities; peers, which are slow, on a part of the grid. Each run has a second, and who
is not back soon after is killed. One row per family and solver: share of cells proven optimal and
share feasible within the second, median and worst time, worst gap to the best bound that any solver
proved, and how many answers did not fit. The same items, `relax`'s bound and the check of every
answer are shared by all. Then: 100,000 random problems against dynamic programming; real instances,
where benchmarks/instances has any; and peak memory at 10,000 items.

    python benchmarks/solvers.py [--quick] [--only grid,random,real,memory] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # so that a solver's own process finds the module below

from torch_knapsacks import FROM_TORCH  # noqa: E402

import remat  # noqa: E402
from remat.errors import SolverError  # noqa: E402
from remat.plugins import isolated, registry  # noqa: E402
from remat.solvers import KnapsackProblem, Solver, Status, run  # noqa: E402
from remat.solvers.bounds import relax  # noqa: E402
from remat.testing.families import FAMILIES, family  # noqa: E402

RESULTS = ROOT / "results" / "solvers.json"
INSTANCES = ROOT / "instances"
LIMIT_S = 1.0
GRACE_S = 1.0
OURS = ("native", "auto", "dp", "greedy")
PEERS = ("cpsat", "milp", "pulp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One problem of the grid; ``peers``: whether the slow ones face it too."""

    family: str
    items: int
    span: int
    share: int
    seed: int
    peers: bool

    def problem(self) -> KnapsackProblem:
        return family(
            self.family, items=self.items, span=self.span, share=self.share, seed=self.seed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one solver made of one cell; no value where it gave no answer that fits."""

    solver: str
    cell: Cell
    seconds: float
    value: int | None = None
    bound: int | None = None
    proven: bool = False
    infeasible: bool = False
    reason: str | None = None


def grid(quick: bool) -> Iterator[Cell]:
    sizes = (50, 300) if quick else (50, 300, 1_000, 10_000)
    spans = (10**3, 10**7) if quick else (10**3, 10**5, 10**7)
    draws = ((50, 1),) if quick else tuple((h, s) for h in (10, 50, 90) for s in (1, 2, 3))
    for name in FAMILIES:
        for items in sizes:
            for span in spans:
                for share, seed in draws:
                    peers = seed == 1 and share == 50 and items <= 1_000 and span != 10**5
                    yield Cell(
                        family=name, items=items, span=span, share=share, seed=seed, peers=peers
                    )


def contestants() -> tuple[list[Solver], list[Solver], list[str]]:
    """Ours, in this process; peers, each in its own; and why somebody is missing."""
    notes, ours, peers = [], [], []
    for name in (*OURS, *PEERS):
        try:
            solver = registry().solver(name)
        except SolverError as error:
            notes.append(str(error))
            continue
        if name in OURS:
            ours.append(solver)
        else:
            peers.append(isolated(solver, grace_s=GRACE_S))
    peers += [isolated(kind(), grace_s=GRACE_S) for kind in FROM_TORCH]
    for solver in (*ours, *peers):
        warm_up(solver)
    return ours, peers, notes


def warm_up(solver: Solver) -> None:
    """Have it load its libraries before the clock runs."""
    with contextlib.suppress(SolverError):
        run(solver, family("weakly-correlated", items=40, span=1_000, share=50, seed=1))


def attempt(solver: Solver, cell: Cell, problem: KnapsackProblem, limit_s: float) -> Outcome:
    start = time.perf_counter()
    try:
        solution = run(solver, problem, time_limit=limit_s)
    except SolverError as error:
        seconds = time.perf_counter() - start
        warm_up(solver)  # it may have been killed
        return Outcome(
            solver=solver.name,
            cell=cell,
            seconds=seconds,
            infeasible="overweight" in str(error),
            reason=str(error),
        )
    return Outcome(
        solver=solver.name,
        cell=cell,
        seconds=time.perf_counter() - start,
        value=solution.value,
        bound=solution.bound,
        proven=solution.status is Status.OPTIMAL,
    )


def run_grid(cells: Iterable[Cell], limit_s: float) -> tuple[list[Outcome], list[str]]:
    ours, peers, notes = contestants()
    outcomes = []
    for cell in cells:
        problem = cell.problem()
        facing = (*ours, *(peers if cell.peers else ()))
        outcomes += [attempt(solver, cell, problem, limit_s) for solver in facing]
    return outcomes, notes


def summarise(outcomes: list[Outcome], limit_s: float, *, shared: bool) -> list[dict[str, Any]]:
    """One row per family and solver, and one per solver over all families.

    Args:
        outcomes: of the whole grid.
        limit_s: seconds that count as in time.
        shared: of the cells that every solver faced only, so that rows compare.
    """
    bounds: dict[Cell, int] = {}
    for o in outcomes:
        known = bounds.get(o.cell)
        if known is None:
            known = relax(o.cell.problem()).bound
        bounds[o.cell] = known if o.bound is None else min(known, o.bound)
    rows = []
    solvers = list(dict.fromkeys(o.solver for o in outcomes))
    for name in (*FAMILIES, "all"):
        for solver in solvers:
            mine = [
                o
                for o in outcomes
                if o.solver == solver
                and name in (o.cell.family, "all")
                and (o.cell.peers or not shared)
            ]
            if not mine:
                continue
            gaps = [
                (bounds[o.cell] - o.value) / max(1, bounds[o.cell])
                for o in mine
                if o.value is not None
            ]
            in_time = [o for o in mine if o.seconds <= limit_s * 1.05]
            rows.append(
                {
                    "family": name,
                    "solver": solver,
                    "cells": len(mine),
                    "proven": sum(o.proven for o in in_time) / len(mine),
                    "feasible": sum(o.value is not None for o in in_time) / len(mine),
                    "median_s": statistics.median(o.seconds for o in mine),
                    "worst_s": max(o.seconds for o in mine),
                    "worst_gap": max(gaps, default=None),
                    "infeasible": sum(o.infeasible for o in mine),
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'family':30} {'solver':17} {'cells':>5} {'proven':>7} {'feasible':>8} {'median':>10}"
        f" {'worst':>10} {'worst gap':>10} {'over':>5}"
    )
    for r in rows:
        gap = "-" if r["worst_gap"] is None else f"{r['worst_gap']:.4%}"
        print(
            f"{r['family']:30} {r['solver']:17} {r['cells']:>5} {r['proven']:>7.1%}"
            f" {r['feasible']:>8.1%} {r['median_s'] * 1e3:>8.2f}ms {r['worst_s'] * 1e3:>8.1f}ms"
            f" {gap:>10} {r['infeasible']:>5}"
        )


def targets(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The cells that have a target of their own, for the compiled kernel."""
    asked = (
        (("uncorrelated", "weakly-correlated"), 10_000, 0.010),
        (("strongly-correlated", "inverse-strongly-correlated"), 1_000, 1.0),
    )
    rows = []
    for names, items, target_s in asked:
        for name in names:
            mine = [
                o
                for o in outcomes
                if o.solver == "native"
                and (o.cell.family, o.cell.items, o.cell.span) == (name, items, 10**7)
            ]
            if mine:
                rows.append(
                    {
                        "family": name,
                        "items": items,
                        "target_s": target_s,
                        "median_s": statistics.median(o.seconds for o in mine),
                        "worst_s": max(o.seconds for o in mine),
                        "proven": sum(o.proven for o in mine) / len(mine),
                    }
                )
    return rows


def table_optimum(problem: KnapsackProblem) -> int:
    """The optimum by dynamic programming over the capacity, which must be small."""
    best = np.zeros(min(problem.capacity, problem.total_weight) + 1, dtype=np.int64)
    for weight, value in zip(problem.weights, problem.values, strict=True):
        if weight < len(best):
            best[weight:] = np.maximum(best[weight:], best[: len(best) - weight] + value)
    return int(best[-1])


def random_problem(draw: random.Random) -> tuple[KnapsackProblem, int]:
    """A small problem in any units, and its optimum."""
    count = draw.randint(0, 14)
    kind = draw.randrange(5)
    span = draw.choice((3, 12, 60))
    weights = [draw.randint(0, span) for _ in range(count)]
    values = {
        0: [draw.randint(0, span) for _ in weights],
        1: [w + span // 10 + 1 for w in weights],
        2: list(weights),
        3: [max(0, w - span // 10) for w in weights],
        4: [draw.choice((0, 1, span)) for _ in weights],
    }[kind]
    small = KnapsackProblem(tuple(weights), tuple(values), draw.randint(0, sum(weights) + 1))
    by, worth = draw.choice((1, 1, 512, 2**30 + 1)), draw.choice((1, 1, 1_000_003))
    scaled = KnapsackProblem(
        tuple(w * by for w in weights),
        tuple(v * worth for v in values),
        small.capacity * by + draw.randrange(by),
    )
    return scaled, table_optimum(small) * worth


def run_random(count: int) -> list[dict[str, Any]]:
    """How often a solver of ours is over capacity, or below the optimum while claiming it."""
    rows = []
    for name in ("native", "auto", "dp"):
        if name not in registry().solver_names():
            continue
        solver, draw = registry().solver(name), random.Random(1)
        problems = count if name == "native" else count // 10
        refused = wrong = unproven = 0
        start = time.perf_counter()
        for _ in range(problems):
            problem, optimum = random_problem(draw)
            try:
                solution = run(solver, problem)
            except SolverError as error:
                refused += 1
                print(f"{name}: {error}: {problem}")
                continue
            claims = solution.status is Status.OPTIMAL
            if (claims and solution.value != optimum) or solution.bound < optimum:
                wrong += 1
                print(f"{name}: {solution} where {optimum} is optimal: {problem}")
            unproven += not claims
        rows.append(
            {
                "solver": name,
                "problems": problems,
                "refused_answers": refused,
                "wrong_claims": wrong,
                "unproven": unproven,
                "seconds": time.perf_counter() - start,
            }
        )
        print(
            f"{name}: {problems:,} random problems, {refused} refused answers (over capacity or"
            f" malformed), {wrong} wrong claims, {unproven} not proven, {rows[-1]['seconds']:.0f} s"
        )
    return rows


def instances() -> Iterator[tuple[str, KnapsackProblem]]:
    """Captured knapsacks, each at the capacity of its file."""
    for path in sorted(INSTANCES.glob("knapsack_*.json")):
        made = remat.load_instance(path)
        share = made.problem.capacity / max(1, made.problem.total_weight)
        yield f"{made.name} at {share:.0%}", made.problem


def run_real(limit_s: float) -> list[dict[str, Any]]:
    """Captured instances: median of five runs of ours, one of each peer."""
    ours, peers, _ = contestants()
    rows = []
    for name, problem in instances():
        print(f"{name}: {len(problem)} items")
        for solver in (*ours, *peers):
            times, reason, solution = [], None, None
            for _ in range(5 if solver in ours else 1):
                start = time.perf_counter()
                try:
                    # PyTorch's dp is given its time: the comparison is by how much.
                    limit = None if solver.name.startswith("torch") else limit_s
                    solution = run(solver, problem, time_limit=limit)
                except SolverError as error:
                    reason = str(error)
                times.append(time.perf_counter() - start)
            rows.append(
                {
                    "instance": name,
                    "items": len(problem),
                    "solver": solver.name,
                    "seconds": statistics.median(times),
                    "value": None if solution is None else solution.value,
                    "proven": solution is not None and solution.status is Status.OPTIMAL,
                    "reason": reason,
                }
            )
            r = rows[-1]
            said = "proven" if r["proven"] else reason or "not proven"
            print(f"    {r['solver']:17} {r['seconds'] * 1e3:>10.3f} ms  {said}")
    if not rows:
        print(f"no instances in {INSTANCES}: skipped")
    return rows


PEAK = """
import json, resource, sys
from remat.plugins import registry
from remat.solvers import KnapsackProblem, run
from remat.testing.families import family

def peak():
    try:  # ru_maxrss starts from what the parent had
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

name, kind = sys.argv[1:]
problem = family(kind, items=10_000, span=10**7, share=50, seed=1)
solver = registry().solver(name)
run(solver, family(kind, items=100, span=1_000, share=50, seed=1))  # libraries are loaded before
before = peak()
run(solver, problem, time_limit=1.0)
print(json.dumps({"growth_bytes": peak() - before, "peak_bytes": peak()}))
"""


def run_memory() -> list[dict[str, Any]]:
    """Peak memory of a fresh process that solves 10,000 items, and its growth while solving."""
    rows = []
    for solver in OURS:
        if solver not in registry().solver_names():
            continue
        for kind in ("uncorrelated", "strongly-correlated", "circle"):
            done = subprocess.run(
                [sys.executable, "-c", PEAK, solver, kind],
                capture_output=True,
                text=True,
                check=True,
            )
            rows.append({"solver": solver, "family": kind, **json.loads(done.stdout)})
            r: dict[str, Any] = rows[-1]
            print(
                f"{solver:8} {kind:20} grows by {r['growth_bytes'] / 2**20:>6.1f} MiB"
                f" to {r['peak_bytes'] / 2**20:>6.1f} MiB"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    parser.add_argument("--only", default="grid,random,real,memory")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds per run")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    parts = options.only.split(",")
    record: dict[str, Any] = {
        "remat": remat.__version__,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "limit_s": options.limit,
        "quick": options.quick,
    }
    if "grid" in parts:
        outcomes, notes = run_grid(grid(options.quick), options.limit)
        for note in notes:
            print(f"note: {note}")
        record["notes"] = notes
        record["families"] = summarise(outcomes, options.limit, shared=False)
        record["shared"] = summarise(outcomes, options.limit, shared=True)
        record["targets"] = targets(outcomes)
        print("on all cells that each solver faced")
        show(record["families"])
        print("on the cells that all solvers faced")
        show([r for r in record["shared"] if r["family"] == "all"])
        for r in record["targets"]:
            print(
                f"{r['family']}, n = {r['items']:,}, R = 10^7: median {r['median_s'] * 1e3:.1f} ms,"
                f" worst {r['worst_s'] * 1e3:.1f} ms, target {r['target_s'] * 1e3:.0f} ms,"
                f" proven {r['proven']:.0%}"
            )
        record["not_proven"] = [
            {**asdict(o.cell), "solver": o.solver, "seconds": o.seconds, "reason": o.reason}
            for o in outcomes
            if o.solver == "native" and not o.proven
        ]
    if "random" in parts:
        record["random"] = run_random(2_000 if options.quick else 100_000)
    if "real" in parts:
        record["real"] = run_real(options.limit)
    if "memory" in parts:
        record["memory"] = run_memory()
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
