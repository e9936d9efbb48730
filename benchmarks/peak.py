"""How near the simulated peak of a plan is to the memory that its step really takes, on the CPU.

    python benchmarks/peak.py [--quick] [--models llama,gpt2] [--output FILE] [--asked-only]

Every model of `benchmarks.models` at nine budgets, through ``torch.compile(backend="remat")`` with
the graphs run as they are. The peak is measured twice: by *storages* (a dispatch mode follows what
operators return until it is freed), which is what the simulation means to predict; and by the
*allocator* (every allocation that the profiler records), which also sees what an operator allocates
and frees by itself: the workspace of a convolution is in no graph.

Then every model is planned for peaks between its least and its largest (``remat.Peak``), and what the
step takes is held against what was asked. ``Peak(share)`` falls from 1 to 0 in ten steps, and what the step
takes should fall with it. ``--asked-only`` does only these, for a file of before. Of shares of bytes it is
counted how often the step took more than at budget 1, and whether the plan had warned.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau, spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat
from benchmarks.machine import header, quiet
from benchmarks.models import ZOO, build
from remat.running.measure import measure_step

BUDGETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1)
#: Largest difference that the simulation may have, and least rank correlation.
LIMIT, CORRELATION = 0.02, 0.99
#: Largest share by which a step may go above the peak that was asked for.
OVER = 0.01
RESULTS = Path(__file__).parent / "results" / "peak.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model at one budget; all in bytes.

    Attributes:
        model: name in the zoo.
        budget: as it was asked for.
        saved_bytes: what forward saves for backward.
        simulated: the plan's peak.
        storages: the peak that was measured by storages.
        allocator: the peak that the allocator saw.
        warned: whether the plan gave a `remat.PeakWarning`.
    """

    model: str
    budget: float
    saved_bytes: int
    simulated: int
    storages: int
    allocator: int
    warned: bool = False

    @property
    def error(self) -> float:
        """Relative difference of simulation and storages."""
        return self.simulated / self.storages - 1

    @property
    def inside(self) -> float:
        """What operators allocate by themselves at the peak, relative to it."""
        return self.allocator / self.storages - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One model planned for a peak; all in bytes."""

    model: str
    asked: int
    simulated: int
    storages: int

    @property
    def over(self) -> float:
        """How far above what was asked the step went, relative to it; below 0 where it stayed under."""
        return self.storages / self.asked - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="budgets 0, 0.5 and 1")
    parser.add_argument("--models", default=",".join(ZOO), help="names, separated by commas")
    parser.add_argument("--output", type=Path, default=None, help=f"JSON file (default {RESULTS})")
    parser.add_argument("--asked-only", action="store_true", help="only peaks that are asked for")
    given = parser.parse_args()
    budgets = (0, 0.5, 1) if given.quick else BUDGETS
    output = given.output or (RESULTS.with_suffix(".quick.json") if given.quick else RESULTS)
    console = Console(width=None if sys.stdout.isatty() else 100)
    start = time.perf_counter()
    cells: list[Cell] = []
    if given.asked_only:
        cells = [Cell(**c) for c in json.loads(output.read_text())["cells"]]
    else:
        for name in given.models.split(","):
            with console.status(name):
                cells += measure(name, budgets)
            console.print(f"{name}: measured, {time.perf_counter() - start:.0f} s", highlight=False)
    asked: list[Asked] = []
    fallen: list[Asked] = []
    for name in given.models.split(","):
        with console.status(f"{name}, peaks asked for"):
            asked += ask(name, [c for c in cells if c.model == name])
            fallen += fall(name)
        console.print(
            f"{name}: peaks asked for, {time.perf_counter() - start:.0f} s", highlight=False
        )
    console.print(table(cells))
    found = report(cells, asked, fallen, time.perf_counter() - start)
    for line in summary(found):
        console.print(line, highlight=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"written to {output}")
    worst = (
        found["largest_error"] > LIMIT,
        found["kendall_tau"] < CORRELATION,
        found["over"] > OVER,
    )
    if any(worst):
        raise SystemExit(1)


def measure(name: str, budgets: Sequence[float]) -> list[Cell]:
    cells = []
    for budget in budgets:
        torch._dynamo.reset()
        step = build(name)
        compiled: Any = torch.compile(
            step.model, backend="remat", options={"budget": budget, "lower": "eager"}
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", remat.PeakWarning)
            by_storages = measure_step(compiled, step.args, step.kwargs)
        plan = remat.plans()[-1]
        with quiet():
            by_allocator = measure_step(compiled, step.args, step.kwargs, by="allocator")
        cells.append(
            Cell(
                model=name,
                budget=budget,
                saved_bytes=plan.saved_bytes,
                simulated=plan.peak_bytes,
                storages=by_storages.peak_bytes,
                allocator=by_allocator.peak_bytes,
                warned=any(issubclass(w.category, remat.PeakWarning) for w in seen),
            )
        )
    return cells


def ask(name: str, cells: Sequence[Cell]) -> list[Asked]:
    """Plans for peaks between the least and the largest that were measured, and measures those."""
    low, high = min(c.storages for c in cells), max(c.storages for c in cells)
    found = []
    for share in (0.05, 0.3, 0.7):
        torch._dynamo.reset()
        step = build(name)
        peak = low + int((high - low) * share) + 16
        compiled: Any = torch.compile(
            step.model, backend="remat", options={"budget": remat.Peak(peak), "lower": "eager"}
        )
        measured = measure_step(compiled, step.args, step.kwargs)
        simulated = remat.plans()[-1].peak_bytes
        found.append(
            Asked(model=name, asked=peak, simulated=simulated, storages=measured.peak_bytes)
        )
    return found


def fall(name: str) -> list[Asked]:
    """Plans for shares of the peak from 1 to 0, and measures those; ``asked`` is the share in tenths."""
    found = []
    for tenths in range(10, -1, -1):
        torch._dynamo.reset()
        step = build(name)
        options = {"budget": remat.Peak(tenths / 10), "lower": "eager"}
        compiled: Any = torch.compile(step.model, backend="remat", options=options)
        measured = measure_step(compiled, step.args, step.kwargs)
        simulated = remat.plans()[-1].peak_bytes
        found.append(
            Asked(model=name, asked=tenths, simulated=simulated, storages=measured.peak_bytes)
        )
    return found


def rises(fallen: Sequence[Asked]) -> float:
    """The largest share by which the measured peak rises where the budget falls."""
    pairs = [(a, b) for a, b in pairwise(fallen) if a.model == b.model]
    return max((b.storages / a.storages - 1 for a, b in pairs), default=0.0)


def above_budget_1(cells: Sequence[Cell]) -> list[Cell]:
    """Cells in which less was saved than at budget 1 and more was taken."""
    top = {c.model: c.storages for c in cells if c.budget == 1}
    return [c for c in cells if c.storages > top.get(c.model, c.storages)]


def table(cells: Sequence[Cell]) -> Table:
    """One line per model."""
    shown = Table(title="Simulated against measured peak, KiB", title_justify="left")
    for head in ("model", "cells", "peaks", "largest error", "bytes off", "inside operators"):
        shown.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    for name in dict.fromkeys(c.model for c in cells):
        own = [c for c in cells if c.model == name]
        low, high = min(c.storages for c in own), max(c.storages for c in own)
        shown.add_row(
            name,
            str(len(own)),
            f"{low / 1024:.1f} to {high / 1024:.1f}",
            f"{max(abs(c.error) for c in own):.4%}",
            str(max(abs(c.simulated - c.storages) for c in own)),
            f"up to {max(c.inside for c in own):.2%}",
        )
    return shown


def summary(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{len(found['cells'])} cells: simulation off by at most {found['largest_error']:.4%}; exact "
        f"to the byte in {found['exact']}"
    )
    yield (
        f"rank correlation over all cells: Spearman {found['spearman']:.6f}; over the "
        f"{found['pairs']} pairs of cells whose peaks differ by more than 1 %: Kendall "
        f"{found['kendall_tau']:.6f}"
    )
    yield (
        f"against the allocator, which sees inside operators: at most {found['allocator_error']:.2%} "
        f"below, Spearman {found['allocator_spearman']:.6f}, Kendall on the same pairs "
        f"{found['allocator_kendall_tau']:.6f}, within models {found['allocator_tau_within']:.6f}"
    )
    yield (
        f"{len(found['asked'])} peaks asked for: the step took at most {found['over']:+.4%} of what was "
        "asked"
    )
    yield (
        f"while remat.Peak(share) fell from 1 to 0, the measured peak rose by at most "
        f"{found['largest_rise']:+.3%}; under shares of bytes it was above budget 1's in "
        f"{found['above_budget_1_warned']} cells that had warned and in {found['above_budget_1']} that had "
        f"not; {found['warned']} warned"
    )


def report(
    cells: Sequence[Cell], asked: Sequence[Asked], fallen: Sequence[Asked], seconds: float
) -> dict[str, Any]:
    simulated = [c.simulated for c in cells]
    tau, pairs = _tau([(c.simulated, c.storages) for c in cells])
    seen = [(c.simulated, c.allocator) for c in cells]
    within = [
        _tau([(c.simulated, c.allocator) for c in cells if c.model == name])
        for name in dict.fromkeys(c.model for c in cells)
    ]
    return {
        **header("peak"),
        "elapsed_s": round(seconds, 1),
        "limits": {"error": LIMIT, "rank_correlation": CORRELATION},
        "largest_error": max(abs(c.error) for c in cells),
        "exact": sum(c.simulated == c.storages for c in cells),
        "spearman": float(spearmanr(simulated, [c.storages for c in cells]).statistic),
        "kendall": float(kendalltau(simulated, [c.storages for c in cells]).statistic),
        "kendall_tau": tau,
        "pairs": pairs,
        "allocator_error": max(1 - s / a for s, a in seen),
        "allocator_spearman": float(spearmanr(simulated, [c.allocator for c in cells]).statistic),
        "allocator_kendall_tau": _tau(seen)[0],
        "allocator_tau_within": sum(t * n for t, n in within) / max(1, sum(n for _, n in within)),
        "over": max(a.over for a in asked),
        "asked": [asdict(a) for a in asked],
        "largest_rise": rises(fallen),
        "fallen": [asdict(a) for a in fallen],
        "above_budget_1": sum(not c.warned for c in above_budget_1(cells)),
        "above_budget_1_warned": sum(c.warned for c in above_budget_1(cells)),
        "warned": sum(c.warned for c in cells),
        "cells": [asdict(c) for c in cells],
    }


def _tau(pairs: Sequence[tuple[int, int]]) -> tuple[float, int]:
    """Kendall's correlation over the pairs whose measured peaks differ by more than 1 %."""
    agree = total = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        if abs(b - d) > 0.01 * max(b, d):
            total += 1
            agree += ((a - c) * (b - d) > 0) - ((a - c) * (b - d) < 0)
    return (agree / total if total else 1.0), total


if __name__ == "__main__":
    main()
