"""Small graphs for tests, traced from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import remat
from remat.graph.joint import output_node
from remat.graph.problems.schedule_lowering import LoweredSchedule
from remat.solvers.schedule.problem import ScheduleEvaluation, evaluate_schedule


def traced(f: Callable[..., Any], *args: torch.Tensor) -> remat.JointGraph:
    """Just what the function does, every output a forward output: no autograd, no decompositions."""
    module = make_fx(f, tracing_mode="fake", _disable_torch_fn_metadata_mode=True)(*args)
    outputs = pytree.arg_tree_leaves(*output_node(module.graph).args)
    return remat.JointGraph(graph_module=module, num_fwd_outputs=len(outputs))


def joint_of(f: Callable[..., Any], *args: torch.Tensor, **kwargs: Any) -> remat.JointGraph:
    """The joint graph of a training step, without decompositions."""
    torch._dynamo.reset()
    return remat.capture(f, args, lower="eager", **kwargs)


def calls(graph: fx.Graph | fx.GraphModule) -> list[str]:
    """Names of the nodes that compute something, in order."""
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return [n.name for n in graph.nodes if n.op == "call_function"]


def placeholders(graph: fx.Graph | fx.GraphModule) -> list[str]:
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return [n.name for n in graph.nodes if n.op == "placeholder"]


def node(joint: remat.JointGraph, name: str) -> fx.Node:
    (found,) = (n for n in joint.graph.nodes if n.name == name)
    return found


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def evaluated(
    step: LoweredSchedule, forward: fx.GraphModule, backward: fx.GraphModule
) -> ScheduleEvaluation:
    """The schedule in which forward and backward run the nodes of a schedule problem, evaluated.

    Every state and copy of the problem runs; those that forward does not have take no bytes.
    """
    first, second = (
        [n.name for n in m.graph.nodes if n.op == "call_function"] for m in (forward, backward)
    )
    left_out = {step.of_name[name] for name in step.of_name.keys() - set(first)} & {*step.optional}
    size = tuple(0 if i in left_out else b for i, b in enumerate(step.problem.size))
    runs = dict.fromkeys([*step.copies, *(at for name in first for at in step.runs_of(name))])
    again = [run[-1] for name in second if (run := step.runs_of(name))]
    return evaluate_schedule(replace(step.problem, size=size), (*runs, *again), len(runs))
