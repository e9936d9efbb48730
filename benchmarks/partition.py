"""Our partitioner and PyTorch's on the same captured joint graph, in one process.

Llama stacks with 7B-shaped layers, at budgets 1.0 and 0.3. Both sides get a copy of the same graph,
turn and turn about, and are timed alike, four ways: garbage collection off or on, and the code of
both halves generated inside the clock or left to whoever asks for it, as `torch.compile` does. The
code generator is PyTorch's on both sides; "limit" is the ratio that a partitioner would reach which
takes no time itself. What counts is the processor time of this process, since both
sides use one thread; seconds by the clock are recorded beside it.

Besides the whole: the minimum cut, on the very network that PyTorch builds; `cse`, extraction and
reordering against their counterparts; how our time grows with the graph; what the pass manager adds
to the passes; what `import remat` adds to `import torch`.

    python benchmarks/partition.py [--layers 2,8,32,128] [--theirs-up-to 32] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import remat
from benchmarks import partition_parts as parts
from benchmarks.machine import describe_cpu
from remat.integrations.partitioner import Partitioner

RESULTS = Path(__file__).parent / "results" / "partition.json"

#: How both sides are timed: whether garbage is collected, and whether code is generated.
WAYS = {
    "collection off": (False, False),
    "as torch.compile": (True, False),
    "code, collection off": (False, True),
    "code, collection on": (True, True),
}

Modules = tuple[fx.GraphModule, fx.GraphModule]


def llama(layers: int) -> remat.JointGraph:
    """A Llama with 7B-shaped layers on the meta device, captured as Inductor would see it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers)).train()
        ids = torch.zeros(1, 2048, dtype=torch.long)
    return remat.capture(model, kwargs={"input_ids": ids, "labels": ids})


def ours(joint: remat.JointGraph, budget: float) -> Callable[[fx.GraphModule], Modules]:
    partition = Partitioner(budget=budget, solver="dp", cost="flops")
    return lambda module: partition(
        module,
        [],
        num_fwd_outputs=joint.num_fwd_outputs,
        static_lifetime_input_indices=list(joint.static_inputs),
    )


def theirs(joint: remat.JointGraph, budget: float) -> Callable[[fx.GraphModule], Modules]:
    settings: dict[str, Any] = {
        "activation_memory_budget": budget,
        "activation_memory_budget_solver": "dp",
    }

    def partition(module: fx.GraphModule) -> Modules:
        with functorch_config.patch(**settings):
            return min_cut_rematerialization_partition(
                module,
                [],
                num_fwd_outputs=joint.num_fwd_outputs,
                static_lifetime_input_indices=list(joint.static_inputs),
            )

    return partition


@contextmanager
def collecting(on: bool) -> Iterator[None]:
    gc.collect()
    (gc.enable if on else gc.disable)()
    try:
        yield
    finally:
        gc.enable()


def timed(
    joint: remat.JointGraph, partition: Callable[[fx.GraphModule], Modules], way: str
) -> tuple[list[float], Modules]:
    """Processor seconds, seconds by the clock, processor seconds of generating code; the halves."""
    collect, generate = WAYS[way]
    module = joint.copy().graph_module  # both sides take apart the graph that they are given
    # Modules are lazy, as under `torch.compile`: each half's code is generated once, or not at all.
    with fx._lazy_graph_module._use_lazy_graph_module(True), collecting(collect):
        start, clock = time.process_time(), time.perf_counter()
        halves = partition(module)
        split = time.process_time()
        for half in halves if generate else ():
            _ = half.code
        end = time.process_time()
        return [end - start, time.perf_counter() - clock, end - split], halves


def compare(joint: remat.JointGraph, budget: float, repeat: int, *, both: bool) -> dict[str, Any]:
    """Both sides at one budget, turn and turn about."""
    sides = {"ours": ours(joint, budget), **({"pytorch": theirs(joint, budget)} if both else {})}
    row: dict[str, Any] = {"budget": budget, "joint_nodes": len(joint.graph.nodes)}
    row |= {name: {} for name in sides}
    timed(joint, sides["ours"], next(iter(WAYS)))  # afterwards the process knows all operators
    for way in WAYS:
        seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
        for _ in range(repeat):
            for name, partition in sides.items():
                spent, halves = timed(joint, partition, way)
                seconds[name].append(spent)
                row[name]["nodes"] = [len(h.graph.nodes) for h in halves]
        for name, all_spent in seconds.items():
            keys = ("seconds", "clock_seconds", "code_seconds")
            medians = map(statistics.median, zip(*all_spent, strict=True))
            row[name][way] = dict(zip(keys, medians, strict=True))
        if both:
            mine, other = row["ours"][way], row["pytorch"][way]
            row[f"ratio {way}"] = other["seconds"] / mine["seconds"]
            if WAYS[way][1]:
                free = other["seconds"] - other["code_seconds"] + mine["code_seconds"]
                row[f"limit {way}"] = free / mine["code_seconds"]
    row["ours"]["saved_bytes"] = remat.plans()[-1].saved_bytes
    if both:
        row["cuts"] = parts.cuts(lambda: sides["pytorch"](joint.copy().graph_module))
    return row


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Exponents of our time over the number of joint nodes: over all sizes, and over the last two."""
    way = next(iter(WAYS))
    points = [(r["joint_nodes"], r["ours"][way]["seconds"]) for r in rows if r["budget"] == 1]

    def exponent(a: tuple[int, float], b: tuple[int, float]) -> float:
        return math.log(b[1] / a[1]) / math.log(b[0] / a[0])

    if len(points) < 2:
        return {}
    return {"overall": exponent(points[0], points[-1]), "last": exponent(*points[-2:])}


def show(layers: int, row: dict[str, Any]) -> None:
    text = f"{layers:>6} {row['budget']:>6} {row['joint_nodes']:>6}"
    for way in WAYS:
        mine = row["ours"][way]["seconds"]
        if "pytorch" in row:
            text += f" {row['pytorch'][way]['seconds']:>8.2f}s {mine:>7.3f}s"
            text += f" {row[f'ratio {way}']:>5.1f}x"
            if WAYS[way][1]:
                text += f" {row[f'limit {way}']:>5.1f}x"
        else:
            text += f" {'-':>9} {mine:>7.3f}s {'-':>6}" + " " * 7 * WAYS[way][1]
    if "cuts" in row:
        slow = sum(c["networkx_seconds"] for c in row["cuts"])
        fast = sum(c["ortools_seconds"] for c in row["cuts"])
        equal = all(c["networkx_value"] == c["ortools_value"] for c in row["cuts"])
        text += f" {len(row['cuts']):>4} {slow / fast:>6.0f}x {'equal' if equal else 'DIFFER':>7}"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", default="2,8,32,128")
    parser.add_argument("--budgets", default="1.0,0.3")
    parser.add_argument("--theirs-up-to", type=int, default=32, help="layers, for PyTorch's side")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "remat": remat.__version__,
        "machine": f"{platform.machine()}, {describe_cpu()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "repeat": options.repeat,
    }
    print(f"torch {torch.__version__}, remat {remat.__version__}, {record['machine']}")
    print(f"processor seconds, median of {options.repeat}")
    columns = f" {'PyTorch':>9} {'ours':>8} {'ratio':>6}"
    heads = {way: columns + f" {'limit':>6}" * code for way, (_, code) in WAYS.items()}
    print(f"{'':>20}" + "".join(f"{way:^{len(h)}}" for way, h in heads.items()) + f" {'cuts':^20}")
    print(
        f"{'layers':>6} {'budget':>6} {'joint':>6}"
        + "".join(heads.values())
        + f" {'n':>4} {'ratio':>7} {'values':>7}"
    )
    rows: list[dict[str, Any]] = []
    for layers in map(int, options.layers.split(",")):
        joint = llama(layers)
        both = layers <= options.theirs_up_to
        for budget in map(float, options.budgets.split(",")):
            row = {"layers": layers, **compare(joint, budget, options.repeat, both=both)}
            rows.append(row)
            show(layers, row)
        if both:
            reference = joint
    record["rows"] = rows
    record["growth"] = growth(rows)
    for name, exponent in record["growth"].items():
        print(f"our time grows with the power {exponent:.2f} of the nodes ({name})")
    budget = float(options.budgets.split(",")[-1])
    record["parts"] = parts.against_counterparts(
        reference, ours(reference, budget), theirs(reference, budget), options.repeat
    )
    for name, (mine, other) in record["parts"].items():
        print(
            f"{name:<12} {mine * 1e3:>7.1f} ms, PyTorch's {other * 1e3:>7.1f} ms: {other / mine:.1f}x"
        )
    record["manager_overhead"] = parts.manager_overhead(reference, budget)
    for name, share in record["manager_overhead"].items():
        print(f"{name}: the pass manager adds {share:.2%} to the passes")
    record["import_seconds"] = parts.import_seconds()
    for name, seconds in record["import_seconds"].items():
        print(f"{name} takes {seconds * 1e3:.0f} ms beyond import torch")
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
