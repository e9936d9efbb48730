"""The whole frontier in one run, and its knee, beside PyTorch's sweep of a hundred solver runs.

Over the real instances in benchmarks/instances. Both knees are scored alike: distance from no memory
and no recomputation, both scaled to the frontier between the same least and greatest budget.

    python benchmarks/frontier.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._functorch._activation_checkpointing import graph_info_provider, knapsack_evaluator
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

import remat
from remat.graph.knapsack_evaluator import GraphInfoProvider, KnapsackEvaluator
from remat.solvers.frontier import knapsack_frontier

ROOT = Path(__file__).parent
LEAST, MOST = 0.001, 0.5  # budgets, as shares of all bytes


def timed(run: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    times, result = [], None
    for _ in range(repeat):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "frontier.json")
    options = parser.parse_args()
    rows = []
    print(
        f"{'instance':22} {'items':>6} {'points':>8} {'tolerance':>9} {'frontier':>10}"
        f" {'knee':>9} {'PyTorch':>9} {'ratio':>7} {'score':>8} {'PyTorch':>8}"
    )
    for path in sorted((ROOT / "instances").glob("knapsack_*.json")):
        made = remat.load_instance(path)
        weights, values = made.problem.weights, made.problem.values
        problem = remat.KnapsackProblem(weights, values, sum(weights))
        frontier_s, frontier = timed(lambda p=problem: knapsack_frontier(p), 5)
        total = sum(weights)
        names = [f"n{i}" for i in range(len(weights))]
        facts = {
            "graph_nodes_in_order": names,
            "graph_edges": [],
            "all_recomputable_banned_nodes": names,
            "recorded_knapsack_input_memories": [w / total for w in weights],
            "recorded_knapsack_input_runtimes": [float(v) for v in values],
        }
        ours = KnapsackEvaluator(GraphInfoProvider(**facts))
        theirs = knapsack_evaluator.KnapsackEvaluator(
            graph_info_provider.GraphInfoProvider(**facts)
        )
        knee_s, mine = timed(
            lambda e=ours: e.get_knee_point_memory_budget(
                max_mem_budget=MOST, min_mem_budget=LEAST
            ),
            5,
        )
        sweep_s, swept = timed(
            lambda e=theirs: e.get_knee_point_memory_budget(dp_knapsack, MOST, LEAST, 100), 1
        )

        # Both axes scaled between the ends of the frontier within the budgets.
        low = frontier.best_within(int(LEAST * total))
        high = frontier.best_within(int(MOST * total))

        def score(
            budget: float, f: Any = frontier, a: int = low, b: int = high, t: int = total
        ) -> float:
            i = f.best_within(int(budget * t * (1 + 1e-9)))
            x = (f.weights[i] - f.weights[a]) / (f.weights[b] - f.weights[a])
            y = (f.values[b] - f.values[i]) / (f.values[b] - f.values[a])
            return (x * x + y * y) ** 0.5

        rows.append(
            {
                "instance": made.name,
                "items": len(weights),
                "points": len(frontier),
                "tolerance": frontier.tolerance,
                "frontier_seconds": frontier_s,
                "knee_seconds": knee_s,
                "pytorch_knee_seconds": sweep_s,
                "ratio": sweep_s / knee_s,
                "score": score(mine),
                "pytorch_score": score(swept),
            }
        )
        print(
            f"{made.name:22} {len(weights):>6} {len(frontier):>8} {frontier.tolerance:>9.1e}"
            f" {frontier_s * 1e3:>8.1f}ms {knee_s * 1e3:>7.1f}ms {sweep_s * 1e3:>7.0f}ms"
            f" {sweep_s / knee_s:>6.0f}x {score(mine):>8.5f} {score(swept):>8.5f}",
            flush=True,
        )
    record = {"torch": torch.__version__, "remat": remat.__version__, "machine": platform.machine()}
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps({**record, "rows": rows}, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
