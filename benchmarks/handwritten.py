"""What people write by hand, beside remat's plan at the same peak: modelled, nothing runs.

``hand-written``: a side is a way to choose by hand what a step recomputes. Its peak is simulated, and its time is modelled.
remat then plans the step within that peak. ``ratio`` is the hand-written step's time over the plan's; ``greedy_ratio`` is the
time of a plan by the solver ``greedy`` alone over that of the plan. A budget is a ratio of PyTorch's partitioner.

Hand-written policies become the tags that `torch.utils.checkpoint` and its context functions leave in a joint graph. remat splits the
tagged graph at budget 1, as `torch.compile` does without a budget.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, timed
from benchmarks.figures import above, geometric_mean, grouped
from benchmarks.torch_partitioner import Split, partition, score
from benchmarks.workloads import captured
from remat.errors import BudgetError
from remat.graph.liveness import simulate_peak
from remat.graph.source import module_path
from remat.planning.pipelines import prepare

COST = "roofline:h100"
#: Ratios for PyTorch's partitioner.
RATIOS = (0.2, 0.5, 0.8)
ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.convolution.default)


LAYERS = (r"(model\.)?layers\.\d+\b", "self_attn")
#: What matches the start of the names of a model's blocks, and what is found in the names of modules of attention.
MODELS = {
    "llama-8b": LAYERS,
    "llama-70b": LAYERS,
    "qwen3-moe": LAYERS,
    "vit-huge": (r"(vit\.)?(encoder\.)?layers?\.\d+\b", "attention"),
    "dit-xl": (r"blocks\.\d+\b", ""),  # its attention is a function
    "sdxl": (r"((down|up)\.\d+|middle)\.\d+\b|last\b", r"\.(own|cross)\b"),
}
#: Whether an operator of a block is saved, by its number among the products and whether it is attention.
Rule = Callable[[fx.Node, int, bool], bool]


def is_attention(node: fx.Node) -> bool:
    """Whether a node is fused attention, or an element of its result."""
    maker = node.args[0] if node.target is operator.getitem else node
    return "scaled_dot_product" in str(getattr(maker, "target", ""))


#: Every which block is recomputed, and what is saved in it.
POLICIES: dict[str, tuple[int, Rule]] = {
    "every block": (1, lambda node, product, attends: False),
    "every second block": (2, lambda node, product, attends: False),
    "every second product saved": (
        1,
        lambda node, product, attends: product % 2 == 1 or is_attention(node),
    ),
    "attention saved": (1, lambda node, product, attends: attends or is_attention(node)),
}
BY_PYTORCH = "PyTorch's budget"
#: Costs and link of the machines on which everything is offloaded.
LINKS = {
    "all offloaded (PCIe 5)": (COST, "pcie5"),
    "all offloaded (GH200)": ("roofline:gh200", "nvlink-c2c"),
}


def tagged(joint: remat.JointGraph, name: str, every: int, is_saved: Rule) -> remat.JointGraph:
    """A copy of a joint graph with the tags of a hand-written policy."""
    (block, attention), copy = MODELS[name], joint.copy()
    blocks: dict[str, int] = {}
    product = -1
    for node in copy.graph.nodes:
        path = module_path(node) if "nn_module_stack" in node.meta else ""
        found = re.match(block, path)
        if node.op != "call_function" or found is None:
            continue
        number = blocks.setdefault(found[0], len(blocks))
        product += node.target in PRODUCTS
        if number % every:
            continue
        at = product if node.target in PRODUCTS else 0
        attends = bool(attention and re.search(attention, path))
        saved = is_saved(node, at, attends)
        node.meta["recompute"] = (
            CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE
        )
        node.meta["ac_graph_id"] = number
    assert blocks, f"no block of {joint.name} matches {block}"
    return copy


def by_hand(joint: remat.JointGraph, name: str, side: str) -> tuple[int, int]:
    """Peak in bytes and recompute cost of a hand-written policy."""
    every, is_saved = POLICIES[side]
    plan = remat.plan(tagged(joint, name, every, is_saved), 1, cost=COST)
    return plan.peak_bytes, plan.recompute_cost


def by_pytorch(joint: remat.JointGraph, ratio: float | None) -> tuple[int, int]:
    """Peak in bytes and recompute cost of what PyTorch's partitioner makes of a graph."""
    modules = partition(joint.copy(), ratio)
    peak = simulate_peak(*modules, joint.num_fwd_outputs).nbytes
    return peak, score(prepare(joint), COST, Split.of(joint, modules))[0].recompute_cost


def measure_handwritten(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name)
    full = remat.plan(joint, 1, cost=COST)
    whole = full.step_cost
    yield Case(workload=name, side="graph").row(
        nodes=len(joint.graph.nodes),
        budget_1_peak_bytes=full.peak_bytes,
        step_ms=whole / 1e9,
        budget_1_ms=(whole + full.recompute_cost) / 1e9,
    )
    for case in cases:
        if case.side in LINKS:
            yield offloaded(joint, case)
            continue
        if case.side in POLICIES:
            peak, cost = by_hand(joint, name, case.side)
        else:
            peak, cost = by_pytorch(joint, case.budget)
        planned = partial(remat.plan, joint, remat.Peak(peak), cost=COST)
        seconds, _, plan = timed(planned)
        ms, plan_ms = ((whole + each) / 1e9 for each in (cost, plan.recompute_cost))
        found: Row = {"peak_bytes": peak, "ms": ms, "plan_ms": plan_ms, "greedy_ms": None}
        with suppress(BudgetError):  # no decision of the greedy solver may be within this peak
            found["greedy_ms"] = (whole + planned(solver="greedy").recompute_cost) / 1e9
            found["greedy_ratio"] = found["greedy_ms"] / plan_ms
        figures = {"plan_peak_bytes": plan.peak_bytes, "seconds": round(seconds, 1)}
        yield case.row(**found, **figures, ratio=ms / plan_ms)


def offloaded(joint: remat.JointGraph, case: Case) -> Row:
    """Everything that can be goes to the host, beside the plan that may offload within the same peak."""
    cost, link = LINKS[case.side]
    tagged = joint.copy()
    for node in tagged.graph.nodes:
        if node.op == "call_function" and "nn_module_stack" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.PREFER_CPU_OFFLOAD
    by_all = remat.plan(tagged, 1, cost=cost, offload=link)
    plan = remat.plan(joint, remat.Peak(by_all.peak_bytes), cost=cost, offload=link)
    ms, plan_ms = ((p.step_cost + p.recompute_cost + p.exposed_time) / 1e9 for p in (by_all, plan))
    return case.row(
        peak_bytes=by_all.peak_bytes,
        ms=ms,
        plan_ms=plan_ms,
        plan_peak_bytes=plan.peak_bytes,
        host_bytes=by_all.host_bytes,
        plan_host_bytes=plan.host_bytes,
        ratio=ms / plan_ms,
    )


def summarise(rows: list[Row]) -> Row:
    """Geometric means of the ratios by side, and the number of cells in which the plan is dearer."""
    cells = [row for row in rows if "ratio" in row]
    greedy = [row["greedy_ratio"] for row in cells if "greedy_ratio" in row]
    return {
        "cells": len(cells),
        "plan_dearer": sum(row["ratio"] < 1 for row in cells),
        "geometric_means": {
            side: round(geometric_mean((row["ratio"] for row in of), 0.01), 4)
            for side, of in grouped(cells, "side").items()
        },
        "greedy": round(geometric_mean(greedy or [1], 0.01), 4),
    }


EXPERIMENTS = {
    "hand-written": Experiment(
        about="what people write by hand, beside the plan at the same peak",
        cases=(
            *grid(MODELS, sides=POLICIES),
            *grid(MODELS, RATIOS, (BY_PYTORCH,)),
            *grid(MODELS, sides=LINKS),
        ),
        quick=grid(("sdxl",), sides=POLICIES),
        measure=measure_handwritten,
        summarise=summarise,
        missed=lambda summary: above(summary, {"plan_dearer": 0}),
    ),
}
