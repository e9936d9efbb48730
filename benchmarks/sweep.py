"""A sweep that is killed twice and gone on with: equal, row by row, to the one that nobody disturbed.

    python benchmarks/sweep.py [--json FILE]

Twenty small models at five budgets. One sweep runs to its end. Another runs in a process that is killed with
SIGKILL after a third of the rows, is asked again, killed after two thirds, and asked again; its table is compared
with the first one's in all but times.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat

RESULTS = Path(__file__).parent / "results" / "sweep.json"
BUDGETS = (0.1, 0.3, 0.5, 0.8, "peak:0.5")
#: Figures that are seconds.
TIMES = ("plan_s", "solve_s")
KINDS = (nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU)
DEPTHS = range(1, 6)


def model(
    kind: type[nn.Module], depth: int
) -> tuple[nn.Module, tuple[torch.Tensor], dict[str, Any]]:
    """Linear layers with an activation behind each, and a batch for them."""
    with torch.device("meta"):
        layers = [part for _ in range(depth) for part in (nn.Linear(32, 32), kind())]
        return nn.Sequential(*layers), (torch.empty(64, 32),), {}


def models() -> dict[str, Any]:
    return {f"{kind.__name__} × {n}": partial(model, kind, n) for kind in KINDS for n in DEPTHS}


def sweep(output: Path) -> None:
    remat.sweep(models(), budgets=BUDGETS, output=output)


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table without times."""
    told = json.loads(path.read_text())["rows"]
    return [{name: v for name, v in row.items() if name not in TIMES} for row in told]


def written(path: Path) -> int:
    """Rows that are on disk so far."""
    partial_path = path.with_name(f"{path.name}.partial")
    return partial_path.read_text().count("\n") - 1 if partial_path.exists() else 0


def killed_after(output: Path, count: int) -> int:
    """Begins a sweep in a process, kills it once so many rows are on disk, and returns how many are."""
    command = [sys.executable, __file__, "--child", str(output)]
    with subprocess.Popen(command) as child:
        while child.poll() is None and written(output) < count:
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
    return written(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        sweep(options.child)
        return
    from machine import header

    total = len(models()) * len(BUDGETS)
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole.json", Path(folder) / "broken.json"
        start = time.perf_counter()
        sweep(whole)
        seconds = time.perf_counter() - start
        kills = [killed_after(broken, total * k // 3) for k in (1, 2)]
        sweep(broken)
        expected, found = rows(whole), rows(broken)
    result = {
        "rows": total,
        "rows_on_disk_when_killed": kills,
        "equal_rows": sum(a == b for a, b in zip(expected, found, strict=True)),
        "rows_without_plan": sum(row["reason"] is not None for row in expected),
        "undisturbed_s": round(seconds, 1),
    }
    options.json.write_text(json.dumps({**header("sweep"), **result}, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
