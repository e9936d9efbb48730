"""How near the simulated peak of a plan is to the memory that its step really takes, on the CPU.

    python benchmarks/peak.py [--quick] [--models llama,gpt2] [--output FILE]

Every model of `benchmarks.models` at nine budgets, through ``torch.compile(backend="remat")`` with
the graphs run as they are. The peak is measured twice: by *storages* (a dispatch mode follows what
operators return until it is freed), which is what the simulation means to predict; and by the
*allocator* (every allocation that the profiler records), which also sees what an operator allocates
and frees by itself: the workspace of a convolution is in no graph.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau, spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat
from benchmarks.models import ZOO, build
from remat.graph.measure import measure_step

BUDGETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1)
#: Largest difference that the simulation may have, and least rank correlation.
LIMIT, CORRELATION = 0.02, 0.99
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
    """

    model: str
    budget: float
    saved_bytes: int
    simulated: int
    storages: int
    allocator: int

    @property
    def error(self) -> float:
        """Relative difference of simulation and storages."""
        return self.simulated / self.storages - 1

    @property
    def inside(self) -> float:
        """What operators allocate by themselves at the peak, relative to it."""
        return self.allocator / self.storages - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="budgets 0, 0.5 and 1")
    parser.add_argument("--models", default=",".join(ZOO), help="names, separated by commas")
    parser.add_argument("--output", type=Path, default=None, help=f"JSON file (default {RESULTS})")
    given = parser.parse_args()
    budgets = (0, 0.5, 1) if given.quick else BUDGETS
    output = given.output or (RESULTS.with_suffix(".quick.json") if given.quick else RESULTS)
    console = Console(width=None if sys.stdout.isatty() else 100)
    start = time.perf_counter()
    cells: list[Cell] = []
    for name in given.models.split(","):
        with console.status(name):
            cells += measure(name, budgets)
    console.print(table(cells))
    found = report(cells, time.perf_counter() - start)
    for line in summary(found):
        console.print(line, highlight=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"written to {output}")
    if found["largest_error"] > LIMIT or found["kendall_tau"] < CORRELATION:
        raise SystemExit(1)


def measure(name: str, budgets: Sequence[float]) -> list[Cell]:
    cells = []
    for budget in budgets:
        torch._dynamo.reset()
        step = build(name)
        compiled: Any = torch.compile(
            step.model, backend="remat", options={"budget": budget, "lower": "eager"}
        )
        by_storages = measure_step(compiled, step.args, step.kwargs)
        plan = remat.plans()[-1]
        with _quiet():
            by_allocator = measure_step(compiled, step.args, step.kwargs, by="allocator")
        cells.append(
            Cell(
                model=name,
                budget=budget,
                saved_bytes=plan.saved_bytes,
                simulated=plan.peak_bytes,
                storages=by_storages.peak_bytes,
                allocator=by_allocator.peak_bytes,
            )
        )
    return cells


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Some builds of the profiler announce themselves on the terminal."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


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


def report(cells: Sequence[Cell], seconds: float) -> dict[str, Any]:
    simulated = [c.simulated for c in cells]
    tau, pairs = _tau([(c.simulated, c.storages) for c in cells])
    seen = [(c.simulated, c.allocator) for c in cells]
    within = [
        _tau([(c.simulated, c.allocator) for c in cells if c.model == name])
        for name in dict.fromkeys(c.model for c in cells)
    ]
    return {
        "benchmark": "peak",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "remat": remat.__version__,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
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


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


if __name__ == "__main__":
    main()
