"""Our partitioner and PyTorch's on the same captured joint graph, in one process.

For Llama of 2, 8 and 32 layers and budgets 1.0 and 0.3: node counts, time of the whole partitioner,
and time inside the cut, on the very network that PyTorch builds. Both sides get a copy of the same
graph; garbage collection is off and code generation is forced on both sides inside the clock.

    python benchmarks/partition.py [--layers 2,8,32] [--repeat 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import remat
from remat.compile import Partitioner

RESULTS = Path(__file__).parent / "results" / "partition.json"


def llama(layers: int) -> remat.JointGraph:
    """A Llama with 7B-shaped layers on the meta device, captured as Inductor would see it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers)).train()
        ids = torch.zeros(1, 2048, dtype=torch.long)
    return remat.capture(model, kwargs={"input_ids": ids, "labels": ids})


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of ``run`` with garbage collection off, and its result."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds, result


def ours(joint: remat.JointGraph, budget: float, repeat: int) -> dict[str, Any]:
    partition = Partitioner(budget=budget, solver="dp", cost="flops")

    def run() -> Any:
        return partition(
            fresh.graph_module,
            [],
            num_fwd_outputs=joint.num_fwd_outputs,
            static_lifetime_input_indices=list(joint.static_inputs),
        )

    times, modules = [], None
    for _ in range(repeat):
        fresh = joint.copy()  # it takes apart the graph it is given, as PyTorch's does
        seconds, modules = timed(lambda: generated(run()))
        times.append(seconds)
    plan = remat.plans()[-1]
    assert modules is not None
    return {
        "seconds": statistics.median(times),
        "nodes": sizes(modules),
        "saved_bytes": plan.saved_bytes,
    }


def theirs(joint: remat.JointGraph, budget: float, repeat: int) -> dict[str, Any]:
    """PyTorch's partitioner, with the time that it spends in its minimum cuts taken apart."""
    cuts: list[tuple[float, int, float, int, tuple[int, int]]] = []
    original = nx.minimum_cut

    def minimum_cut(graph: Any, source: str, sink: str, **kwargs: Any) -> Any:
        start = time.perf_counter()
        value, partition = original(graph, source, sink, **kwargs)
        spent = time.perf_counter() - start
        mine, my_value = max_flow(graph, source, sink)
        cuts.append((spent, int(value), mine, my_value, (len(graph), graph.number_of_edges())))
        return value, partition

    def run() -> Any:
        return min_cut_rematerialization_partition(
            fresh.graph_module,
            [],
            num_fwd_outputs=joint.num_fwd_outputs,
            static_lifetime_input_indices=list(joint.static_inputs),
        )

    times, modules = [], None
    settings = {"activation_memory_budget": budget, "activation_memory_budget_solver": "dp"}
    with functorch_config.patch(**settings):
        for _ in range(repeat):
            fresh = joint.copy()  # it changes the graph it is given
            seconds, modules = timed(lambda: generated(run()))
            times.append(seconds)
        fresh = joint.copy()
        nx.minimum_cut = minimum_cut
        try:
            run()
        finally:
            nx.minimum_cut = original
    assert modules is not None
    return {
        "seconds": statistics.median(times),
        "nodes": sizes(modules),
        "cuts": [
            {
                "networkx_seconds": a,
                "networkx_value": b,
                "ortools_seconds": c,
                "ortools_value": d,
                "vertices": size[0],
                "edges": size[1],
            }
            for a, b, c, d, size in cuts
        ],
    }


def max_flow(graph: Any, source: str, sink: str) -> tuple[float, int]:
    """OR-Tools' maximum flow on PyTorch's own network: seconds from arrays to the cut, and its value."""
    from ortools.graph.python import max_flow as ortools

    number = {v: i for i, v in enumerate(graph)}
    edges = list(graph.edges(data="capacity", default=float("inf")))
    finite = [c for _, _, c in edges if c != float("inf")]
    big = int(sum(finite)) + 1
    tails = np.array([number[u] for u, _, _ in edges], dtype=np.int64)
    heads = np.array([number[v] for _, v, _ in edges], dtype=np.int64)
    # 2^62 over the arcs at the source keeps any sum of capacities in range.
    limit = min(big, 2**62 // (1 + graph.degree(source)))
    caps = np.array([limit if c == float("inf") else min(int(c), limit) for _, _, c in edges])
    start = time.perf_counter()
    flow = ortools.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, caps.astype(np.int64))
    status = flow.solve(number[source], number[sink])
    flow.get_sink_side_min_cut()
    seconds = time.perf_counter() - start
    assert status == flow.OPTIMAL, status
    return seconds, int(flow.optimal_flow())


def generated(modules: Any) -> Any:
    """Forces the code of both modules to be generated."""
    for module in modules:
        module.recompile()
        _ = module.code
    return modules


def sizes(modules: Any) -> list[int]:
    return [len(m.graph.nodes) for m in modules]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", default="2,8,32")
    parser.add_argument("--budgets", default="1.0,0.3")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"torch {torch.__version__}, remat {remat.__version__}, median of {options.repeat}")
    print(
        f"{'layers':>6} {'budget':>6} {'joint':>6} {'PyTorch':>9} {'ours':>8} {'ratio':>6}"
        f" {'cuts':>4} {'NetworkX':>10} {'OR-Tools':>10} {'ratio':>7} {'values':>7}"
    )
    for layers in map(int, options.layers.split(",")):
        joint = llama(layers)
        for budget in map(float, options.budgets.split(",")):
            mine = ours(joint, budget, options.repeat)
            other = theirs(joint, budget, options.repeat)
            slow = sum(c["networkx_seconds"] for c in other["cuts"])
            fast = sum(c["ortools_seconds"] for c in other["cuts"])
            equal = all(c["networkx_value"] == c["ortools_value"] for c in other["cuts"])
            rows.append(
                {
                    "layers": layers,
                    "budget": budget,
                    "joint_nodes": len(joint.graph.nodes),
                    "ours": mine,
                    "pytorch": other,
                    "ratio": other["seconds"] / mine["seconds"],
                    "cut_ratio": slow / fast,
                    "cut_values_equal": equal,
                }
            )
            print(
                f"{layers:>6} {budget:>6} {len(joint.graph.nodes):>6} {other['seconds']:>8.2f}s"
                f" {mine['seconds']:>7.2f}s {rows[-1]['ratio']:>5.1f}x {len(other['cuts']):>4}"
                f" {slow * 1e3:>8.1f}ms {fast * 1e3:>8.2f}ms {slow / fast:>6.0f}x"
                f" {'equal' if equal else 'DIFFER':>7}",
                flush=True,
            )
    options.json.parent.mkdir(exist_ok=True)
    record = {
        "torch": torch.__version__,
        "remat": remat.__version__,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "repeat": options.repeat,
        "rows": rows,
    }
    options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
