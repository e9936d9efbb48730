"""How good plans are: beside PyTorch's partitioner and what people write by hand, on the same joint graphs.

``plan-quality``: at every budget, PyTorch's partitioner decides (defaults: knapsack ``dp``, runtimes ``flops``). Its decision
is scored by remat's evaluator on remat's graph problem. remat's solver decides under exactly the bytes that PyTorch's
decision saves. The side is the cost model. The side ``whole`` has the seconds of whole partitioners on copies of the same graph, down
to generated code; ``deep`` has the plan of a graph of 50,000 nodes; ``graph`` has the figures of the graph itself.

``flops``: recomputed FLOPs of whole plans over those of PyTorch's decision, at its bytes, by each solver. A named solver
decides alone.

``hand-written``: a side is a way to choose by hand what a step recomputes. Its peak is simulated, and its time is modelled.
remat then plans the step within that peak. ``ratio`` is the hand-written step's time over the plan's; ``greedy_ratio`` is the
time of a plan by the solver ``greedy`` alone over that of the plan. A budget is a ratio of PyTorch's partitioner.

Hand-written policies become the tags that `torch.utils.checkpoint` and its context functions leave in a joint graph. remat splits the
tagged graph at budget 1, as `torch.compile` does without a budget.
"""

from __future__ import annotations

import functools
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, timed
from benchmarks.figures import above, geometric_mean, grouped, ratio_of
from benchmarks.torch_partitioner import Split, generated, partition, score, split_by
from benchmarks.workloads import ARCHITECTURES, captured
from remat.errors import BudgetError
from remat.graph.capture.source import module_path
from remat.graph.memory.liveness import memory_curve
from remat.passes.core.state import State
from remat.planning.pipelines import prepare
from remat.plugins.registry import registry
from remat.solvers.run import run

BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FEW = (0.2, 0.5, 0.8)
#: Budgets under each cost model.
COSTS = {"roofline": BUDGETS, "flops": FEW, "roofline-fused": FEW}
DEEP = "llama-240-layers"
SOLVERS = ("auto", "lagrangian", "cpsat", "dp")
COST = "roofline:h100"
#: A ratio counts for no less than this in a geometric mean, so that a cost of 0 does not decide it.
FLOOR = 0.01


def gap_of(cost: int, bound: int) -> float:
    """The proven gap of a plan or solution, as a share of its cost."""
    return (cost - bound) / cost if cost else 0.0


def decisions(joint: remat.JointGraph) -> Callable[[float | None], Split]:
    """PyTorch's decisions on a joint graph by budget, each made once."""
    return functools.cache(lambda budget: Split.of(joint, partition(joint.copy(), budget)))


def cell(state: State, split: Split, case: Case) -> Row:
    """PyTorch's decision at a budget, and remat's under its bytes."""
    lowered = state.lowered(registry().cost_model(case.side))
    evaluation, state_bytes, illegal = score(state, case.side, split)
    problem = lowered.problem.within(evaluation.saved_bytes)
    ours = run(registry().solver("auto"), problem)
    twice = (lowered.of_position[state.index.by_name[name]] for name in split.twice)
    return case.row(
        saved_bytes=evaluation.saved_bytes,
        pytorch={
            "cost": evaluation.recompute_cost,
            "cost_of_modules": sum(problem.cost[i] for i in twice if i >= 0),
            "bytes_of_modules": split.saved_bytes,
            "state_bytes": state_bytes,
            "illegal": illegal,
        },
        ours={"cost": ours.cost, "bound": ours.bound, "saved_bytes": ours.saved_bytes},
        unit=problem.unit,
        ratio=ratio_of(ours.cost, evaluation.recompute_cost),
        gap=gap_of(ours.cost, ours.bound),
    )


def whole(joint: remat.JointGraph, case: Case) -> Row:
    """Seconds of both partitioners, from joint graph to generated code, at the same ratio."""
    theirs, mine = joint.copy(), joint.copy().graph_module
    theirs_s, theirs_cpu_s, _ = timed(lambda: partition(theirs, case.budget))
    ours = remat.partitioner(budget=case.budget, cost=COST)
    ours_s, ours_cpu_s, _ = timed(lambda: generated(split_by(ours, joint, mine)))
    return case.row(
        pytorch_s=round(theirs_s, 3),
        ours_s=round(ours_s, 3),
        pytorch_cpu_s=round(theirs_cpu_s, 3),
        ours_cpu_s=round(ours_cpu_s, 3),
        ratio=ours_s / theirs_s,
        cpu_ratio=ours_cpu_s / theirs_cpu_s,
    )


@functools.cache
def warm_up() -> None:
    """Runs both partitioners on a small graph, so that no clock counts an import."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)), torch.nn.Tanh())
    whole(remat.capture(model, (torch.zeros(4, 8),)), Case(workload="", budget=0.5))


def measure_quality(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    warm_up()
    capture_s, _, joint = timed(lambda: captured(name))
    yield Case(workload=name, side="graph").row(
        joint_nodes=len(joint.graph.nodes), capture_s=round(capture_s, 2)
    )
    for case in cases:
        if case.side not in COSTS:
            yield {"whole": whole, "deep": deep}[case.side](joint, case)
    if cells := [case for case in cases if case.side in COSTS]:
        state = prepare(joint)
        theirs = decisions(state.joint)
        yield from (cell(state, theirs(case.budget), case) for case in cells)


def deep(joint: remat.JointGraph, case: Case) -> Row:
    """Plans a graph of 50,000 nodes: a Llama 7B with more layers than anybody trains."""
    seconds, _, plan = timed(lambda: remat.plan(joint, case.budget))
    return case.row(
        plan_s=round(seconds, 3),
        cost=plan.recompute_cost,
        bound=plan.recompute_bound,
        gap=gap_of(plan.recompute_cost, plan.recompute_bound),
    )


def counted_otherwise(row: Row) -> bool:
    """Whether PyTorch's modules, counted by themselves, come to less than its decision by remat's evaluator.

    More is possible: if PyTorch saves a view and computes its owner again, the owner counts as saved.
    """
    of = row["pytorch"]
    few = of["bytes_of_modules"] < row["saved_bytes"] - of["state_bytes"]
    return bool(of["cost_of_modules"] < of["cost"] or few)


def named(row: Row) -> str:
    return f"{row['workload']} {row['budget']}"


def rises(rows: Sequence[Row]) -> int:
    """Pairs of budgets of one architecture where more bytes come with more cost."""
    by_bytes = sorted(rows, key=lambda row: (row["saved_bytes"], row["budget"]))
    return sum(b["ours"]["cost"] > a["ours"]["cost"] for a, b in pairwise(by_bytes))


def summarise_quality(rows: list[Row]) -> Row:
    found: Row = {}
    by_side = grouped(rows, "side")
    for cost in filter(by_side.get, COSTS):
        cells = by_side[cost]
        nets = grouped(cells).values()
        legal = [row["ratio"] for row in cells if row["pytorch"]["illegal"] is None]
        found[cost] = {
            "architectures": len(nets),
            "cells": len(cells),
            "above_pytorch": [named(row) for row in cells if row["ratio"] > 1],
            "geomean_ratio": geometric_mean((row["ratio"] for row in cells), FLOOR),
            "geomean_ratio_legal": geometric_mean(legal, FLOOR),
            "illegal": len(cells) - len(legal),
            "counted_otherwise": [named(row) for row in cells if counted_otherwise(row)],
            "worst_ratio": max(row["ratio"] for row in cells),
            "share_within_0.1%": statistics.fmean(row["gap"] <= 0.001 for row in cells),
            "worst_gap": max(row["gap"] for row in cells),
            "rises": sum(map(rises, nets)),
        }
    if timings := by_side.get("whole"):
        found["whole"] = {
            "cells": len(timings),
            "geomean_ratio": geometric_mean((row["ratio"] for row in timings), FLOOR),
            "worst_ratio": max(row["ratio"] for row in timings),
            "geomean_cpu_ratio": geometric_mean((row["cpu_ratio"] for row in timings), FLOOR),
            "worst_cpu_ratio": max(row["cpu_ratio"] for row in timings),
            "above_a_fifth": [row["workload"] for row in timings if row["ratio"] > 0.2],
        }
    if plans := by_side.get("deep"):
        found["deep"] = {key: max(row[key] for row in plans) for key in ("plan_s", "gap")}
    return found


def missed_quality(summary: Row) -> list[str]:
    """The figures beside their limits, if they are on the wrong side."""
    found = []
    if of := summary.get("roofline"):
        dearer = len(of["above_pytorch"])
        limits = {"dearer than PyTorch": 0, "geomean_ratio": 0.78, "worst_gap": 0.01, "rises": 0}
        found += above({**of, "dearer than PyTorch": dearer}, limits)
    if deep := summary.get("deep"):
        found += above(deep, {"plan_s": 60, "gap": 0.01})
    return found


def measure_flops(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name)
    state, theirs = prepare(joint), decisions(joint)
    for case in cases:
        evaluation, _, _ = score(state, "flops", theirs(case.budget))
        nbytes, flops = evaluation.saved_bytes, evaluation.recompute_cost
        plan = remat.plan(joint, remat.Saved(nbytes), case.side, "flops")
        ratio = plan.recompute_cost / flops if flops else float(plan.recompute_cost > 0)
        yield case.row(saved_bytes=nbytes, pytorch_flops=flops, ratio=ratio)


def summarise_flops(rows: list[Row]) -> Row:
    worst = {side: max(r["ratio"] for r in of) for side, of in grouped(rows, "side").items()}
    return {"worst": worst}


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
    peak = memory_curve(*modules, joint.num_fwd_outputs).peak_bytes
    return peak, score(prepare(joint), COST, Split.of(joint, modules))[0].recompute_cost


def measure_handwritten(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name)
    full = remat.plan(joint, 1, cost=COST)
    step = full.step_cost
    yield Case(workload=name, side="graph").row(
        nodes=len(joint.graph.nodes),
        budget_1_peak_bytes=full.peak_bytes,
        step_ms=step / 1e9,
        budget_1_ms=(step + full.recompute_cost) / 1e9,
    )
    for case in cases:
        if case.side in LINKS:
            yield offloaded(joint, case)
            continue
        if case.side in POLICIES:
            peak, cost = by_hand(joint, name, case.side)
        else:
            peak, cost = by_pytorch(joint, case.budget)
        planned = functools.partial(remat.plan, joint, remat.Peak(peak), cost=COST)
        seconds, _, plan = timed(planned)
        ms, plan_ms = ((step + each) / 1e9 for each in (cost, plan.recompute_cost))
        found: Row = {"peak_bytes": peak, "ms": ms, "plan_ms": plan_ms, "greedy_ms": None}
        with suppress(BudgetError):  # no decision of the greedy solver may be within this peak
            found["greedy_ms"] = (step + planned(solver="greedy").recompute_cost) / 1e9
            found["greedy_ratio"] = found["greedy_ms"] / plan_ms
        figures = {"plan_peak_bytes": plan.peak_bytes, "seconds": round(seconds, 1)}
        yield case.row(**found, **figures, ratio=ms / plan_ms)


def offloaded(joint: remat.JointGraph, case: Case) -> Row:
    """Everything that can be goes to the host, beside the plan that may offload within the same peak."""
    cost, link = LINKS[case.side]
    copy = joint.copy()
    for node in copy.graph.nodes:
        if node.op == "call_function" and "nn_module_stack" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.PREFER_CPU_OFFLOAD
    by_all = remat.plan(copy, 1, cost=cost, offload=link)
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


def summarise_handwritten(rows: list[Row]) -> Row:
    """Geometric means of the ratios by side, and the number of cells in which the plan is dearer."""
    cells = [row for row in rows if "ratio" in row]
    greedy = [row["greedy_ratio"] for row in cells if "greedy_ratio" in row]
    return {
        "cells": len(cells),
        "plan_dearer": sum(row["ratio"] < 1 for row in cells),
        "geometric_means": {
            side: round(geometric_mean((row["ratio"] for row in of), FLOOR), 4)
            for side, of in grouped(cells, "side").items()
        },
        "greedy": round(geometric_mean(greedy or [1], FLOOR), 4),
    }


EXPERIMENTS = {
    "plan-quality": Experiment(
        about="recompute cost of plans, as a share of that of PyTorch's at the same bytes",
        cases=(
            *grid(ARCHITECTURES, (0.5,), ("whole",)),
            *(case for cost in COSTS for case in grid(ARCHITECTURES, COSTS[cost], (cost,))),
            *grid((DEEP,), (0.3,), ("deep",)),
        ),
        quick=(
            *grid(("resnet-50",), (0.5,), ("whole",)),
            *grid(("resnet-50",), FEW, ("roofline",)),
        ),
        measure=measure_quality,
        summarise=summarise_quality,
        tables=("quality", "architectures", "deep"),
        missed=missed_quality,
    ),
    "flops": Experiment(
        about="recomputed FLOPs of whole plans by solver, as a share of PyTorch's at the same bytes",
        cases=grid(("resnet-50", "bert-large", "unet"), (0.15, 0.3, 0.5, 0.7), SOLVERS),
        quick=grid(("resnet-50",), (0.3,), SOLVERS),
        measure=measure_flops,
        summarise=summarise_flops,
    ),
    "hand-written": Experiment(
        about="what people write by hand, beside the plan at the same peak",
        cases=(
            *grid(MODELS, sides=POLICIES),
            *grid(MODELS, RATIOS, (BY_PYTORCH,)),
            *grid(MODELS, sides=LINKS),
        ),
        quick=grid(("sdxl",), sides=POLICIES),
        measure=measure_handwritten,
        summarise=summarise_handwritten,
        missed=lambda summary: above(summary, {"plan_dearer": 0}),
    ),
}
