"""Draws ``overview.svg``, the picture of the README: ``python docs/overview.py [FILE]``.

Plans one training step of a Llama (8 layers, width 2048, bfloat16, 8 × 2048 tokens; fake tensors,
no GPU) at budgets from 0 to 1 with several solvers, and draws what the plans save and recompute.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

import remat
from remat.api import Comparison
from remat.cli.hf import build

CONFIG = (
    "num_hidden_layers=8 hidden_size=2048 intermediate_size=5632 num_attention_heads=16 "
    "vocab_size=32000 max_position_embeddings=2048 dtype=bfloat16"
)
BUDGETS = tuple(i / 20 for i in range(21))
FINE = tuple(i / 100 for i in range(101))
# Marker, size, color: they often agree, so they must be told apart where they lie on one another.
SOLVERS = {
    "greedy": ("o", 11, "#c2571a"),
    "dp": ("s", 6.5, "#3b7a57"),
    "cpsat": ("x", 5, "#1f3f77"),
}
GIB, MS = 2**30, 1e9


def sweep() -> tuple[Comparison, list[tuple[float, float]]]:
    """All solvers at all budgets on one captured step; and (GiB, proven bound in ms) in fine steps."""
    warnings.simplefilter("ignore")
    example = build("llama", CONFIG.split(), batch=8, seq=2048)
    joint = remat.capture(example.model, example.args, example.kwargs)
    fine = remat.compare(joint, ("greedy",), FINE, cost="roofline:h100")
    bound = [(row.capacity / GIB, row.recompute_bound / MS) for row in fine.rows]
    return remat.compare(joint, tuple(SOLVERS), BUDGETS, cost="roofline:h100"), bound


def draw(comparison: Comparison, bound: list[tuple[float, float]], path: Path) -> None:
    """The frontier: bytes saved to the right, time recomputed upwards."""
    mpl.rcParams.update({"svg.hashsalt": "remat", "svg.fonttype": "path", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    # A bound holds for all plans that save as much or less: steps, not a line between points.
    x, y = zip(*sorted(bound), strict=True)
    axes.fill_between(x, y, step="pre", color="#e3e3e3", linewidth=0, zorder=1)
    axes.text(0.3, 4.0, "proven: no plan is in here", color="#4d4d4d", ha="left")
    for name, (marker, size, color) in SOLVERS.items():
        own = [row for row in comparison.rows if row.solver == name and row.saved_bytes is not None]
        axes.plot(
            [row.saved_bytes / GIB for row in own],
            [row.recompute_cost / MS for row in own],
            marker=marker,
            markersize=size,
            markerfacecolor="none",
            linestyle="none",
            color=color,
            label=name,
            zorder=3,
            clip_on=False,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("saved from forward to backward, GiB")
    axes.set_ylabel("recomputed in backward, ms (roofline, H100)")
    axes.set_title("One training step of a Llama, 8 layers: solvers at 21 budgets", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="solver", frameon=False, loc="upper right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("overview.svg")
    draw(*sweep(), Path(chosen))
    print(f"drawn: {chosen}")
