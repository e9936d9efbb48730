"""Steps that are one graph: what `remat.rematerialize` computes, what it holds, and what it costs.

``whole-step``: forward, loss and backward of a model in one graph, as Dynamo traces them with ``trace_autograd_ops``;
with plain SGD as well. Both graphs run uncompiled, and their results and parameters are compared bit for bit. The peak
is the most bytes that tensors take while the graph runs. Beside it, the plan of the same model as two graphs, at the
same peak.

``whole-tags``: the same graphs with checkpoint tags on each layer's nodes: on all nodes, or on all but matrix products, which
are tagged to be saved. Beside them, the plan without tags at the peak that the tags lead to.

``whole-compiled``: the same steps under Inductor, within 0.85 of the compiled peak of budget 1's plan.

``whole-time``: processor seconds to plan the joint graph of a Llama 7B as one graph, and as two.

``whole-inference``: a forward pass alone, at the least peak that is found.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import remat
from benchmarks.experiment import Case, Experiment, Row, grid
from benchmarks.figures import geometric_mean, grouped
from benchmarks.workloads import COMPILED, captured
from remat.graph.whole_graph import curve_of_one
from remat.torch_compat import dynamo_config
from tests.whole_steps import run, traced

#: Nine models whose compilation is timed, too.
MODELS = ("llama", "resnet", "gpt2-long", "bert", "vit", "t5", "unet", "dit", "moe")
PLACES = (0.75, 0.5, 0.25)


def step_of(name: str, side: str) -> tuple[torch.nn.Module, Callable[..., Any], dict[str, Any]]:
    """A model, its step in one function, and a batch."""
    work = COMPILED[name]
    model, batch = work.build(), work.batches(1)[0]
    parameters = [p for p in model.parameters() if p.requires_grad]

    def with_gradients(**given: Any) -> Any:
        loss = model(**given)
        return loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)

    def with_sgd(**given: Any) -> Any:
        loss, gradients = with_gradients(**given)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=work.rate)
        return loss

    def alone(**given: Any) -> Any:
        with torch.no_grad():
            return model(**given)

    return model, {"grad": with_gradients, "sgd": with_sgd, "inference": alone}[side], batch


def compared(gm: fx.GraphModule, inputs: list[Any], budget: Any) -> tuple[remat.Plan, Row]:
    """The plan of a graph, and how a run of it compares with a run of the graph as it was."""
    started = time.process_time()
    # Workspaces of operators, which this measure cannot see, are left out of the peaks.
    made = remat.rematerialize(gm, budget, cost="roofline")
    seconds, plan = time.process_time() - started, made.meta["remat"]
    (before, most), (after, least) = run(gm, inputs), run(made, inputs)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    return plan, {
        "equal": same,
        "unplanned_bytes": most,
        "planned_bytes": plan.peak_bytes,
        "measured_bytes": least,
        "held": least <= plan.peak_bytes,
        "cost": plan.recompute_cost,
        "bound": plan.recompute_bound,
        "step_cost": plan.step_cost,
        "plan_seconds": round(seconds, 2),
    }


def measure_steps(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    model, _, batch = step_of(name, "grad")
    joint = remat.capture(model, (), batch, lower="eager")
    for side, own in grouped([c.row() for c in cases], "side").items():
        _, step, batch = step_of(name, side)
        gm, inputs = traced(step, batch)
        for row in own:
            case = Case(workload=name, budget=row["budget"], side=side)
            plan, figures = compared(gm, inputs, remat.Peak(case.budget))
            if side == "grad":
                started = time.process_time()
                two = remat.plan(joint, remat.Peak(plan.peak_bytes), cost="roofline")
                figures |= {
                    "two_graphs": two.recompute_cost,
                    "two_graphs_seconds": round(time.process_time() - started, 2),
                }
            yield case.row(nodes=len(gm.graph.nodes), **figures)


def summarise_steps(rows: list[Row]) -> Row:
    both = [r for r in rows if r.get("two_graphs")]
    ratios = [(r["step_cost"] + r["cost"]) / (r["step_cost"] + r["two_graphs"]) for r in both]
    bounded = [r["cost"] / r["bound"] for r in rows if r["bound"]]
    return {
        "equal": sum(r["equal"] for r in rows),
        "held": sum(r["held"] for r in rows),
        "cells": len(rows),
        "recompute_cost_beside_two_graphs": [round(r["cost"] / r["two_graphs"], 4) for r in both],
        "mean_step_cost_beside_two_graphs": round(geometric_mean(ratios), 4),
        "worst_step_cost_beside_two_graphs": round(max(ratios), 4),
        "mean_cost_beside_bound": round(geometric_mean(bounded), 4) if bounded else None,
    }


def measure_inference(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    for case in cases:
        _, step, batch = step_of(name, "inference")
        gm, inputs = traced(step, batch)
        _, figures = compared(gm, inputs, remat.Peak(case.budget))
        simulated = curve_of_one(gm).peak_bytes
        yield case.row(nodes=len(gm.graph.nodes), simulated_unplanned=simulated, **figures)


#: A layer in the path of a module, such as ``layers.3``.
_LAYER = re.compile(r"(?:layers|layer|h|blocks?)\.(\d+)")


def tag(gm: fx.GraphModule, *, saves_products: bool) -> int:
    """Tags forward's nodes of each layer as a checkpoint of the layer would; returns the number of tagged nodes."""
    products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}
    count = 0
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        layer = _LAYER.search(" ".join(path for path, _ in stack.values()))
        if layer is None or node.meta.get("autograd_backward") or node.op != "call_function":
            continue
        saved = saves_products and getattr(node.target, "overloadpacket", None) in products
        node.meta["recompute"] = (
            CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
        )
        node.meta["ac_graph_id"] = int(layer[1])
        count += 1
    return count


def measure_tags(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    for case in cases:
        gm, inputs = traced(*step_of(name, "grad")[1:])
        tagged = copy.deepcopy(gm)
        count = tag(tagged, saves_products=case.side == "operators")
        plan, figures = compared(tagged, inputs, 1.0)
        free = remat.rematerialize(gm, plan.peak_bytes, cost="roofline").meta["remat"]
        yield case.row(tagged=count, without_tags=free.recompute_cost, **figures)


def compiled_results(name: str, budget: Any) -> tuple[list[torch.Tensor], remat.Plan]:
    """Loss and gradients of a whole step that Inductor compiled, and its plan."""
    _, step, batch = step_of(name, "grad")
    torch.compiler.reset()
    compiled = torch.compile(step, backend="remat", options={"budget": budget}, fullgraph=True)
    with dynamo_config.patch(trace_autograd_ops=True):
        loss, gradients = compiled(**batch)
    return [loss, *(g for g in gradients if g is not None)], remat.plans()[-1]


def measure_compiled(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    expected, full = compiled_results(name, 1.0)
    for case in cases:
        budget = int(case.budget * full.peak_bytes)
        found, plan = compiled_results(name, budget)
        off = max(
            float((a - b).norm() / b.norm())
            for a, b in zip(found, expected, strict=True)
            if b.norm()
        )
        yield case.row(
            bytes=budget,
            at_budget_one=full.peak_bytes,
            compiled=plan.peak_bytes,
            held=plan.peak_bytes <= budget,
            recompute_cost=plan.recompute_cost,
            step_cost=plan.step_cost,
            gradients_off=off,
        )


def measure_time(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name, "eager")
    for case in cases:
        started = time.process_time()
        two = remat.plan(joint, remat.Peak(case.budget))
        middle = time.process_time()
        one = remat.rematerialize(joint.graph_module, two.peak_bytes).meta["remat"]
        yield case.row(
            nodes=len(joint.graph.nodes),
            two_graphs_seconds=round(middle - started, 2),
            one_graph_seconds=round(time.process_time() - middle, 2),
            two_graphs=two.recompute_cost,
            one_graph=one.recompute_cost,
            bytes=two.peak_bytes,
        )


EXPERIMENTS = {
    "whole-step": Experiment(
        about="training steps in one graph: results, peaks, and cost beside the plan of two graphs",
        cases=grid(MODELS, PLACES, ("grad", "sgd")),
        quick=grid(("gpt2-long",), (0.5,), ("grad", "sgd")),
        measure=measure_steps,
        summarise=summarise_steps,
    ),
    "whole-tags": Experiment(
        about="checkpoint tags in one graph, and the plan without them at the same peak",
        cases=grid(("llama", "bert", "vit"), (None,), ("layers", "operators")),
        quick=grid(("bert",), (None,), ("layers",)),
        measure=measure_tags,
    ),
    "whole-compiled": Experiment(
        about="training steps in one graph under Inductor: compiled peaks, and gradients beside budget 1's",
        cases=grid(("llama", "bert", "unet", "moe"), (0.85,)),
        quick=grid(("unet",), (0.85,)),
        measure=measure_compiled,
    ),
    "whole-time": Experiment(
        about="processor seconds to plan a Llama 7B as one graph and as two",
        cases=grid(("llama-32",), (0.3, 0.1)),
        quick=grid(("llama-2",), (0.1,)),
        measure=measure_time,
    ),
    "whole-inference": Experiment(
        about="forward passes in one graph, at the least peak that is found",
        cases=grid(("unet", "llama", "resnet"), (0.0,)),
        quick=grid(("unet",), (0.0,)),
        measure=measure_inference,
    ),
}
