"""Recomputed FLOPs of whole plans, beside PyTorch's partitioner at the bytes that its own decision saves.

    python benchmarks/flops.py [--only unet,gpt2-xl] [--json FILE]

PyTorch's side is scored by our evaluator on our graph problem. Ours is `remat.plan` with ``Saved`` bytes, for
``auto`` and for each named solver: no search beside that solver may change what it decides.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES
from machine import header
from torch_partitioner import TorchPartitioner, score

import remat
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry

RESULTS = Path(__file__).parent / "results" / "flops.json"
NETS = ("unet", "resnet-50", "bert-large")
RATIOS = (0.15, 0.3, 0.5, 0.7)
SOLVERS = ("auto", "lagrangian", "cpsat", "dp")


def cells(name: str) -> list[dict[str, Any]]:
    """A row for each ratio: PyTorch's recomputed FLOPs, and ours over them by each solver."""
    joint = remat.capture(*ARCHITECTURES[name]())
    state = prepare(joint)
    lowered = state.lowered(registry().cost_model("flops"))
    theirs, rows = TorchPartitioner(joint), []
    for ratio in RATIOS:
        scored = score(state, lowered, theirs.split(ratio))
        nbytes, flops = scored.evaluation.saved_bytes, scored.evaluation.recompute_cost
        row: dict[str, Any] = {"ratio": ratio, "saved_bytes": nbytes, "pytorch_flops": flops}
        for solver in SOLVERS:
            plan = remat.plan(joint, remat.Saved(nbytes), solver, "flops")
            row[solver] = plan.recompute_cost / flops if flops else float(plan.recompute_cost > 0)
        rows.append(row)
        print(name, json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(NETS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", remat.PeakWarning)
    found = {name: cells(name) for name in options.only.split(",")}
    worst = {s: max(r[s] for rows in found.values() for r in rows) for s in SOLVERS}
    print("worst", json.dumps(worst))
    report = {**header("flops"), "worst": worst, "nets": found}
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
