"""Draws ``overview.svg``, the picture of the README: ``python docs/overview.py [FILE]``.

Plans one training step of a Llama (8 layers, width 2048, bfloat16, 8 × 2048 tokens; fake tensors,
no GPU) over all budgets with three solvers, and draws what the plans save and recompute. ``greedy``
and ``dp`` decide item by item, as PyTorch's partitioner does; ``auto`` decides on the whole graph.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import remat
from remat.cli.hf import build
from remat.report.frontier_plot import Curve, draw_frontiers

CONFIG = (
    "num_hidden_layers=8 hidden_size=2048 intermediate_size=5632 num_attention_heads=16 "
    "vocab_size=32000 max_position_embeddings=2048 dtype=bfloat16"
)
LABELS = {
    "greedy": "greedy, item by item",
    "dp": "dp, item by item as PyTorch's",
    "auto": "auto, on the whole graph",
}


def curves() -> list[Curve]:
    """The frontier of each solver on one captured step."""
    warnings.simplefilter("ignore")
    example = build("llama", CONFIG.split(), batch=8, seq=2048)
    joint = remat.capture(example.model, example.args, example.kwargs)
    drawn = []
    for solver, label in LABELS.items():
        start = time.perf_counter()
        found = remat.frontier(joint, solver, "roofline:h100")
        knee = found.knee()
        drawn.append(
            Curve(
                label=label,
                points=tuple((p.saved_bytes, p.recompute_cost) for p in found.points),
                bound=found.bound,
                knee=(knee.saved_bytes, knee.recompute_cost),
                unit=found.unit,
                full_bytes=found.full_bytes,
            )
        )
        print(f"{solver}: {len(found.points)} points in {time.perf_counter() - start:.1f} s")
    return drawn


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("overview.svg")
    title = "One training step of a Llama with 8 layers, modelled for an H100"
    draw_frontiers(curves(), chosen, title=title)
    print(f"drawn: {chosen}")
