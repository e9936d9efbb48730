"""Time of a first step, cold: with plain Inductor, and with remat at a ratio of the saved bytes.

    python benchmarks/compile_time.py [--models llama,resnet] [--rounds 3] [--json FILE]

Each first step, forward and backward, runs in a process of its own with empty caches; both sides take turns.
Seconds are those from the call to the end of backward; a ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RESULTS = Path(__file__).parent / "results" / "compile_time.json"
SIDES = ("inductor", "remat")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama,resnet,gpt2-long,bert,unet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--one", default="", help="run one side of one model here: SIDE:MODEL")
    given = parser.parse_args()
    if given.one:
        side, _, model = given.one.partition(":")
        print(first_step(model, side, given.budget))
        return
    from benchmarks.machine import header

    rows = []
    for model in given.models.split(","):
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(given.rounds):
            for side in SIDES[:: 1 if turn % 2 else -1]:
                seconds[side].append(cold(model, side, given.budget))
        plain, ours = (statistics.median(seconds[side]) for side in SIDES)
        rows.append({"model": model, "ratio": round(ours / plain, 4), "seconds": seconds})
        print(json.dumps(rows[-1]), flush=True)
    mean = statistics.geometric_mean([r["ratio"] for r in rows])
    found = {
        **header("compile_time"),
        "budget": given.budget,
        "geometric_mean": round(mean, 4),
        "models": rows,
    }
    given.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"first step to plain Inductor's: {mean:.3f} (geometric mean); written to {given.json}")


def cold(model: str, side: str, budget: float) -> float:
    """Seconds of a first step in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [sys.executable, __file__, "--one", f"{side}:{model}", "--budget", str(budget)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "REMAT_CACHE": folder},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    return float(told.stdout.split()[-1])


def first_step(model: str, side: str, budget: float) -> float:
    import torch

    import remat  # noqa: F401
    from benchmarks.step_workloads import CPU

    work = CPU[model]()
    step, batch = work.build(), work.batches(1)[0]
    options = {"budget": budget} if side == "remat" else {}
    compiled = torch.compile(step, backend=side, options=options)
    start = time.perf_counter()
    compiled(**batch).backward()
    return round(time.perf_counter() - start, 3)


if __name__ == "__main__":
    main()
