"""Captures real knapsacks from `transformers` models at real sizes, under fake tensors, as JSON.

    python benchmarks/make_instances.py [NAME …]

Weights are bytes, values picoseconds on an H100 (roofline). Each model gives two: the expensive
operators alone, and with them what only the runtime-optimal cut keeps.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import remat
from remat.cli.hf import build
from remat.graph.costs import Roofline
from remat.passes.candidates import candidates
from remat.passes.min_cut import MinCut
from remat.pipelines import prepare

FOLDER = Path(__file__).parent / "instances"
MODELS: dict[str, tuple[str, str, int, int]] = {
    "llama-32": ("llama", "num_hidden_layers=32 dtype=bfloat16", 1, 2048),
    "gpt2-36": ("gpt2", "n_layer=36 n_embd=1280 n_head=20", 4, 1024),
    "bert-24": ("bert", "num_hidden_layers=24 hidden_size=1024 num_attention_heads=16 intermediate_size=4096", 8, 512),
    "vit-24": ("vit", "num_hidden_layers=24 hidden_size=1024 num_attention_heads=16 intermediate_size=4096", 8, 0),
    "t5-24": ("t5", "num_layers=24 num_decoder_layers=24 d_model=1024 d_ff=4096 num_heads=16", 8, 512),
}  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        kind, config, batch, seq = MODELS[name]
        example = build(kind, config.split(), batch=batch, seq=seq or None)
        joint = remat.capture(example.model, example.args, example.kwargs)
        state = prepare(joint)
        lowered = state.lowered(Roofline())
        loosest = MinCut(
            ban_used_far_apart=False,
            ban_long_fusible_chains=False,
            ban_materialized_backward=False,
            ban_not_in_allowlist=False,
        )
        for part, cut in (("expensive", loosest), ("all", MinCut())):
            items = candidates(state, lowered, cut.banned(state)).candidates
            record = {
                "format": "remat-knapsack-1",
                "name": f"{name}-{part}",
                "source": f"hf:{kind} {config}, batch {batch}, sequence {seq}, Inductor's joint graph",
                "weight_unit": "byte",
                "value_unit": "ps (roofline:h100)",
                "weights": [w for _, w in items],
                "values": [lowered.problem.cost[i] for i, _ in items],
            }
            path = FOLDER / f"knapsack_{name}-{part}.json"
            path.write_text(json.dumps(record) + "\n")
            print(f"{path.name}: {len(items)} items")


if __name__ == "__main__":
    main()
