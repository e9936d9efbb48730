"""How good our plans are: beside PyTorch's partitioner, on the same joint graphs, at the same bytes.

For every architecture of `architectures.py` and budgets 0.1 to 0.9, PyTorch's partitioner decides
(defaults: knapsack ``dp``, runtimes ``flops``), its decision is scored by our evaluator on our graph
problem, and our solver decides under exactly the bytes that PyTorch's decision saves. Costs are
``roofline`` on an H100; a few budgets again under ``flops``, PyTorch's own measure, and under
``roofline-fused``. Whole partitioners, ours and PyTorch's, run on copies of the same captured graph
to generated code; and one graph of 50,000 nodes is planned.

    python benchmarks/plan_quality.py [--quick] [--only NAME,…] [--json FILE] [--show]

With ``--only`` the figures of those named replace theirs in the file, and the rest stays; the file
is written after every step, so that what was measured is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import pickle
import platform
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plan_quality_tables as tables
import torch
from architectures import ARCHITECTURES
from torch_partitioner import TorchPartitioner, generated, partition, score, timed

import remat
from remat.passes.core.state import State
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.solvers.run import run

RESULTS = Path(__file__).parent / "results" / "plan_quality.json"
BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FEW = (0.2, 0.5, 0.8)
#: Budgets under each cost model; the first is the one that the targets are about.
COSTS = {"roofline": BUDGETS, "flops": FEW, "roofline-fused": FEW}
#: The budgets at which whole partitioners are timed.
WHOLE = (0.5,)
QUICK = ("resnet-50", "bert-large", "llama-7b")
#: The graph of 50,000 nodes: Llama 7B with this many layers.
DEEP, DEEP_LAYERS = "llama-240-layers", 240
DEEP_BUDGETS = (0.3,)


class Record:
    """The JSON file, merged with what it holds already and written after every step."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {}
        if path.exists() and not fresh:
            self.data = json.loads(path.read_text())
        self.data |= {
            "torch": torch.__version__,
            "remat": remat.__version__,
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        self.data.setdefault("architectures", {})

    def write(self) -> None:
        order = [*ARCHITECTURES, DEEP]
        found = self.data["architectures"]
        self.data["architectures"] = {n: found[n] for n in order if n in found}
        self.data["summary"] = tables.summary(self.data)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)


def captured(name: str) -> tuple[remat.JointGraph, float]:
    """The joint graph of an architecture, and the seconds that capturing it took."""
    start = time.perf_counter()
    model, args, kwargs = ARCHITECTURES[name]()
    joint = remat.capture(model, args, kwargs)
    return joint, time.perf_counter() - start


def cell(
    state: State, cost: str, splits: TorchPartitioner, budget: float, solver: str
) -> tuple[dict[str, Any], Any]:
    """PyTorch's decision at a budget, and ours under its bytes; and the problem that it was."""
    split = splits.split(budget)
    lowered = state.lowered(registry().cost_model(cost))
    theirs = score(state, lowered, split)
    evaluation = theirs.evaluation
    problem = lowered.problem.within(evaluation.saved_bytes)
    ours = run(registry().solver(solver), problem)
    return {
        "budget": budget,
        "saved_bytes": evaluation.saved_bytes,
        "pytorch": {
            "cost": evaluation.recompute_cost,
            "cost_of_modules": _cost_of(state, lowered, split.twice),
            "bytes_of_modules": split.saved_bytes,
            "state_bytes": theirs.state_bytes,
            "illegal": theirs.illegal,
            "merged": split.merged,
            "seconds": round(split.seconds, 3),
        },
        "ours": {
            "cost": ours.cost,
            "bound": ours.bound,
            "saved_bytes": ours.saved_bytes,
            "seconds": round(ours.elapsed_s, 4),
            "deterministic": ours.deterministic,
        },
        "unit": problem.unit,
        "ratio": tables.ratio(ours.cost, evaluation.recompute_cost),
        "gap": (ours.cost - ours.bound) / ours.cost if ours.cost else 0.0,
    }, problem


def _cost_of(state: State, lowered: Any, twice: Sequence[str]) -> int:
    """The summed cost of operators by name: the cost of PyTorch's modules, counted without a decision."""
    at = (lowered.of_position[state.index.by_name[name]] for name in twice)
    return sum(lowered.problem.cost[i] for i in at if i >= 0)


def whole(joint: remat.JointGraph, budget: float) -> dict[str, Any]:
    """Seconds of both partitioners, from joint graph to generated code, at the same ratio."""
    fresh = joint.copy()
    theirs_s, theirs_cpu_s, _ = timed(lambda: partition(fresh, budget))
    fresh = joint.copy()
    partitioner = remat.partitioner(budget=budget)

    def run() -> Any:
        return generated(
            partitioner(
                fresh.graph_module,
                [],
                num_fwd_outputs=joint.num_fwd_outputs,
                static_lifetime_input_indices=list(joint.static_inputs),
            )
        )

    ours_s, ours_cpu_s, _ = timed(run)
    plan = remat.plans()[-1]
    return {
        "budget": budget,
        "pytorch_s": round(theirs_s, 3),
        "ours_s": round(ours_s, 3),
        "pytorch_cpu_s": round(theirs_cpu_s, 3),
        "ours_cpu_s": round(ours_cpu_s, 3),
        "ratio": ours_s / theirs_s,
        "cpu_ratio": ours_cpu_s / theirs_cpu_s,
        "solver": plan.solver,
        "solve_s": round(plan.solve_s, 4),
        "gap": plan.gap / plan.recompute_cost if plan.recompute_cost else 0.0,
    }


def measure(name: str, record: Record, options: argparse.Namespace) -> None:
    """Measures one architecture and writes what is known after every step."""
    joint, capture_s = captured(name)
    state = prepare(joint)
    row: dict[str, Any] = {
        "joint_nodes": len(joint.graph.nodes),
        "problem_nodes": len(state.lowered(registry().cost_model("roofline")).problem),
        "capture_s": round(capture_s, 2),
        "solver": options.solver,
        "whole": [],
        "cells": {},
    }
    record.data["architectures"][name] = row
    for budget in () if options.no_whole else WHOLE:
        row["whole"].append(whole(joint, budget))
    splits = TorchPartitioner(state.joint)
    for cost, budgets in COSTS.items():
        rows = row["cells"][cost] = []
        for budget in budgets if not options.quick else FEW:
            found, problem = cell(state, cost, splits, budget, options.solver)
            rows.append(found)
            record.write()
            if options.hard is not None and _is_hard(found):
                options.hard.mkdir(parents=True, exist_ok=True)
                path = options.hard / f"{name}-{cost}-{budget}.pickle"
                path.write_bytes(pickle.dumps(problem))
            if options.verbose:
                print(
                    f"  {name} {cost} {budget}: ratio {found['ratio']:.4f} gap {found['gap']:.3%} "
                    f"ours {found['ours']['seconds']:.2f} s, PyTorch {found['pytorch']['seconds']:.1f} s",
                    flush=True,
                )
    row["complete"] = True


def _is_hard(found: dict[str, Any]) -> bool:
    slow = found["ours"]["seconds"] > 0.5 * found["pytorch"]["seconds"]
    return bool(found["ratio"] > 1 or found["gap"] > 0.001 or slow)


def measure_deep(record: Record) -> None:
    """Plans a graph of 50,000 nodes: a captured Llama 7B with more layers than anybody trains."""
    from transformers import LlamaConfig, LlamaForCausalLM

    start = time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=DEEP_LAYERS)).train()
        ids = torch.zeros(1, 2048, dtype=torch.long)
    joint = remat.capture(model, kwargs={"input_ids": ids, "labels": ids})
    row: dict[str, Any] = {
        "joint_nodes": len(joint.graph.nodes),
        "capture_s": round(time.perf_counter() - start, 2),
        "plans": [],
    }
    record.data["architectures"][DEEP] = row
    for budget in DEEP_BUDGETS:
        seconds, cpu_s, plan = timed(lambda budget=budget: remat.plan(joint, budget))
        row["plans"].append(
            {
                "budget": budget,
                "plan_s": round(seconds, 3),
                "plan_cpu_s": round(cpu_s, 3),
                "solve_s": round(plan.solve_s, 3),
                "cost": plan.recompute_cost,
                "bound": plan.recompute_bound,
                "gap": plan.gap / plan.recompute_cost if plan.recompute_cost else 0.0,
            }
        )
        record.write()
    row["complete"] = True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    known = (*ARCHITECTURES, DEEP)
    parser.add_argument("--only", metavar="NAME,…", help=f"any of {', '.join(known)}")
    parser.add_argument(
        "--quick", action="store_true", help=f"{', '.join(QUICK)} at {', '.join(map(str, FEW))}"
    )
    parser.add_argument("--solver", default="auto", help="the solver of graph problems (auto)")
    parser.add_argument(
        "--json", type=Path, help=f"{RESULTS.name} in results, plan_quality-quick.json with --quick"
    )
    parser.add_argument("--show", action="store_true", help="print the tables of the file")
    parser.add_argument("--no-whole", action="store_true", help="leave whole partitioners out")
    parser.add_argument(
        "--hard", type=Path, help="folder for the problems of cells that fall short"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for every cell")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else QUICK if options.quick else known
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"there is no '{unknown[0]}'; known: {', '.join(known)}")
    path = options.json or (
        RESULTS.with_name("plan_quality-quick.json") if options.quick else RESULTS
    )
    record = Record(path, fresh=not (options.only or options.show))
    if options.show:
        tables.show(record.data)
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    warm_up()
    for name in names:
        try:
            measure_deep(record) if name == DEEP else measure(name, record, options)
        except Exception as error:  # one architecture less, and the table says which
            traceback.print_exc()
            record.data["architectures"].setdefault(name, {})["error"] = repr(error)
        record.write()
        gc.collect()
        print(tables.line(name, record.data["architectures"][name]), flush=True)
    print()
    tables.show(record.data)
    print(f"\nwritten to {path}")


def warm_up() -> None:
    """Runs both partitioners on a small graph, so that no clock counts an import."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)), torch.nn.Tanh())
    joint = remat.capture(model, (torch.zeros(4, 8),))
    whole(joint, 0.5)


if __name__ == "__main__":
    main()
