"""Time to plan steps of many thousand nodes by their peak: a frontier, and one plan at half of the range.

    python benchmarks/large_steps.py [--json FILE]

A GPT-2 XL of 80 layers, whose whole frontier by peak is asked for, and one of 190 layers, planned at
`Peak(0.5)`; captured on the meta device, nothing is allocated. Times are without capture.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import header
from transformers import GPT2Config, GPT2LMHeadModel

import remat

RESULTS = Path(__file__).parent / "results" / "large_steps.json"
COST = "roofline:h100"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [frontier(captured(80)), half(captured(190))]
    for row in rows:
        print(json.dumps(row), flush=True)
    options.json.write_text(json.dumps({**header("large_steps"), "rows": rows}, indent=1) + "\n")


def captured(layers: int) -> remat.JointGraph:
    with torch.device("meta"):
        config = GPT2Config(n_embd=1600, n_layer=layers, n_head=25, use_cache=False)
        model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
    tokens = torch.zeros(2, 1024, dtype=torch.long, device="meta")
    given = {"input_ids": tokens, "labels": tokens}
    return remat.capture(model, (), given, lower="inductor", device="cpu")


def frontier(joint: remat.JointGraph) -> dict[str, Any]:
    start = time.perf_counter()
    found = remat.frontier(joint, by="peak", cost=COST)
    seconds = time.perf_counter() - start
    return {
        "what": "frontier by peak",
        "nodes": len(joint.graph.nodes),
        "seconds": round(seconds, 1),
        "points": len(found.points),
    }


def half(joint: remat.JointGraph) -> dict[str, Any]:
    start = time.perf_counter()
    plan = remat.plan(joint, remat.Peak(0.5), cost=COST)
    seconds = time.perf_counter() - start
    return {
        "what": "Peak(0.5)",
        "nodes": len(joint.graph.nodes),
        "seconds": round(seconds, 1),
        "peak_bytes": plan.peak_bytes,
        "recompute_cost": plan.recompute_cost,
        "recompute_bound": plan.recompute_bound,
    }


if __name__ == "__main__":
    main()
