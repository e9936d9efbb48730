"""Plan a graph that AOTAutograd does not partition: a whole training step, or an inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from remat.graph.joint import JointGraph
from remat.graph.whole_graph import curve_of_one, joined, whole_graph
from remat.integrations.stages import Arrived, PlanGraph, Planned
from remat.planning.plan import Plan


def joint_of_whole(arrived: Arrived, gm: fx.GraphModule, name: str) -> JointGraph | None:
    """Convert a graph that has no separate backward to a joint graph; return None if the graph needs no plan.

    A graph that computes gradients gets a plan. An inference gets a plan if it exceeds a budget on the peak in bytes,
    or has a saved plan.

    Args:
        arrived: the stage of the compilation.
        gm: the graph from AOTAutograd, which autograd will not differentiate.
        name: name of the graph in messages.
    """
    request = arrived.options.request
    saved = request.plan
    plans = [] if saved is None else [saved] if isinstance(saved, Plan) else saved.plans
    most = request.budget.peak_bytes if request.decides or request.plans_others else None
    is_planned = arrived.runs_backward or (most is not None and curve_of_one(gm).peak_bytes > most)
    runs = any(n.op == "call_function" for n in gm.graph.nodes)
    if not runs or not (is_planned or plans):
        return None
    joint = whole_graph(gm, lower=arrived.options.lower, name=name)
    return joint if is_planned or joint.fingerprint in {p.fingerprint for p in plans} else None


def plan_whole(
    arrived: Arrived, joint: JointGraph, inputs: Sequence[Any], plan_graph: PlanGraph
) -> tuple[Planned | None, fx.GraphModule]:
    """Plan a step that is one graph; return the plan, and a graph that computes the same results within the budget.

    An inference that cannot meet a peak in bytes runs with the least peak found, and with a warning, unless the option
    ``strict`` is given.

    Args:
        arrived: the stage of the compilation.
        joint: the joint graph from `joint_of_whole`; it is changed.
        inputs: example inputs of the graph.
        plan_graph: the function that plans.

    Raises:
        RematError: planning failed.
    """
    # No other graph keeps values for the backward of a step that is one graph.
    alone = replace(arrived, tally=None, other_graphs_runs=0, other_graphs_bytes=0, is_alone=True)
    planned, modules = alone.partition(joint, inputs, plan_graph)
    return planned, joined(joint, *modules)
