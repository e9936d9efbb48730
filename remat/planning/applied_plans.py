"""Check a saved plan on its graph: every figure in it is recomputed, none is trusted.

What a plan comes to is computed anew when it is applied, and what is not as the file says is refused by name.
Figures can only be compared where they were computed in the same way: by this version of remat and of PyTorch,
for the same lowering and the same sizes, without hooks or a pipeline of one's own. Costs, besides, only where the
cost model is data that ships with remat: what was measured is not measured twice alike. Where figures cannot be
compared, those computed here count; the budget holds in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from remat.errors import PlanError, ProblemError
from remat.graph.costs import CostModel, Roofline
from remat.graph.costs.counting import Flops, Unit
from remat.graph.costs.devices import DEVICES
from remat.graph.costs.fused import RooflineFused
from remat.graph.costs.links import Link
from remat.graph.liveness import own_outputs, simulate_peak
from remat.graph.storages import WORKSPACE, has_symbols
from remat.passes.core.state import State
from remat.planning.offload_copies import Copies
from remat.planning.offload_costs import Times
from remat.planning.pipelines import split
from remat.planning.plan import Plan
from remat.planning.request import PlanRequest
from remat.version import __version__


def edited(plan: Plan, fault: str) -> PlanError:
    """The error for a plan with a false figure."""
    return PlanError(
        f"this plan for '{plan.graph}' is not as it was saved: {fault}; plan again with remat.plan(joint, …)"
    )


def exposed_time(prepared: State, plan: Plan, request: PlanRequest) -> int:
    """Recompute the exposed transfer time of a saved plan.

    Args:
        prepared: the graph, before it is split.
        plan: the saved plan.
        request: how it is applied; its cost model is the plan's, on this graph.

    Raises:
        PlanError: the graph has no such values to offload, or runs wait for another time.
    """
    if not plan.offloads:
        if plan.exposed_time:
            raise edited(
                plan, f"exposed_time is {plan.exposed_time} in it, and nothing is offloaded"
            )
        return 0
    sizes = prepared.storages.nbytes
    of_name = {
        n.name: sizes[prepared.storages.owner[i]] for i, n in enumerate(prepared.index.nodes)
    }
    fault = next(_faults(plan, of_name), None)
    if fault is not None:
        raise edited(plan, fault)
    if request.cost.unit != "ps":
        raise edited(
            plan,
            f"its cost model is {plan.cost}, whose unit is {request.cost.unit}, and offloading is planned by times",
        )
    try:
        link = Link.parse(plan.link)
    except ProblemError as error:
        raise edited(plan, f"link: {error}") from None
    unplaced = tuple(replace(v, freed_after="", fetched_before="") for v in plan.offloads)
    done = split(replace(prepared, decision=replace(plan.decision, offloads=unplaced)))
    try:
        exposed_time = Copies(
            done, plan.offloads, link, Times.of(prepared, request.cost)
        ).exposed_time()
    except PlanError as error:
        raise edited(plan, str(error)) from None
    if (
        _is_comparable(plan, prepared)
        and _is_data(request.cost)
        and exposed_time != plan.exposed_time
    ):
        raise edited(
            plan,
            f"exposed_time is {plan.exposed_time} ps in it, and runs wait {exposed_time} ps for its copies",
        )
    return exposed_time


def _faults(plan: Plan, sizes: dict[str, int]) -> Iterator[str]:
    """Describe the first fault in the offloads of a plan, their cost aside."""
    seen, saved = set(), set(plan.saved)
    for value in plan.offloads:
        if value.name in seen:
            yield f"'{value.name}' is offloaded twice in it"
        seen.add(value.name)
        if value.name not in saved or value.name not in sizes:
            yield f"'{value.name}' is offloaded in it, and is not among what it saves"
        elif value.nbytes != sizes[value.name]:
            yield f"'{value.name}' has {value.nbytes} bytes in it, and {sizes[value.name]} in the graph"


def check_applied(plan: Plan, made: Plan, request: PlanRequest) -> None:
    """Refuse a plan whose figures differ from its step, or that exceeds its budget.

    Args:
        plan: the saved plan.
        made: what it came to on its graph.
        request: how it was applied; its cost model is the plan's, on this graph.

    Raises:
        PlanError: it does not come to what it says.
    """
    if plan.unit != made.unit:
        raise edited(plan, f"unit is {plan.unit} in it, and its costs are in {made.unit}")
    if _is_alike(plan, made.lower) and not made.symbolic:
        figures = _recorded_figures(
            plan,
            with_bytes=request.hooks is None,
            with_peak=not _has_workspaces(made),
            with_costs=_is_data(request.cost),
        )
        for name, claimed, figure in figures:
            found = getattr(made, figure)
            if claimed != found:
                fault = f"{name} is {claimed} in it, and {found} in the step that it makes"
                raise edited(plan, fault)
        least = 0 if request.hooks is not None else _storages_peak(made)
        if plan.peak_bytes < least and not _is_compiled(plan):
            raise edited(
                plan, f"peak_bytes is {plan.peak_bytes} in it, and storages alone take {least}"
            )
    # At other sizes than it was made for it is refused by whoever applies it, who knows which they are.
    fault = "" if made.symbolic else _above_budget(plan, made, alone=not request.of_several)
    if fault:
        raise PlanError(f"this plan for '{plan.graph}' does not keep its budget: {fault}")


def _storages_peak(made: Plan) -> int:
    """The part of a plan's peak that is the same on every machine: no workspaces of operators."""
    outputs = own_outputs(made.forward)
    return simulate_peak(made.forward, made.backward, outputs, workspaces=False).nbytes


def _has_workspaces(made: Plan) -> bool:
    """Whether the peak of a plan has a part that depends on this machine's libraries and threads."""
    graphs = (made.forward, made.backward)
    return any(WORKSPACE in node.meta for gm in graphs for node in gm.graph.nodes)


def _recorded_figures(
    plan: Plan, *, with_bytes: bool, with_peak: bool, with_costs: bool
) -> Iterator[tuple[str, int, str]]:
    """The figures in a plan that can be compared: the field, its value, and the field that is computed."""
    if with_bytes:
        planned = "planned_" if _is_compiled(plan) else ""
        for figure in ("saved_bytes", "peak_bytes")[: 1 + with_peak]:
            yield f"{planned}{figure}", getattr(plan, f"{planned}{figure}"), figure
    if with_costs:
        for figure in ("recompute_cost", "step_cost"):
            yield figure, getattr(plan, figure), figure


def _above_budget(plan: Plan, made: Plan, *, alone: bool) -> str:
    """Describe how a plan exceeds its own budget; empty if it does not.

    A compiled step keeps it as planned or as compiled, of which the latter is computed once it is compiled again.
    Of one of several graphs that share a peak no graph alone tells whether they keep it.
    """
    asked = plan.asked
    if asked.nbytes is not None and made.saved_bytes > asked.nbytes:
        return (
            f"budget is {asked} in it, and the step that it makes saves {made.saved_bytes} bytes; plan again "
            f"within {asked}"
        )
    limit = asked.peak_bytes or (plan.peak_limit if asked.on_peak else 0)
    if not limit or not alone:
        return ""
    peak = made.peak_bytes
    if _is_compiled(plan):  # as Inductor wrote it, a share is held nearly
        peak = min(peak, plan.peak_bytes) if asked.peak_bytes else 0
    elif peak > limit and made.lower == "inductor":
        peak = min(peak, made.predicted_peak_bytes)
    if peak <= limit:
        return ""
    return (
        f"budget is {asked} in it, {limit} bytes, and the step that it makes has a peak of {peak} bytes; plan "
        f"again within {asked}. If it is one of several graphs' plans under one budget, apply their PlanSet"
    )


def _is_comparable(plan: Plan, prepared: State) -> bool:
    return _is_alike(plan, prepared.joint.lower) and not has_symbols(prepared.index.values)


def _is_alike(plan: Plan, lower: str) -> bool:
    """Whether this version computes the figures of a plan as its writer did."""
    return (plan.remat, plan.torch, plan.lower) == (__version__, torch.__version__, lower)


def _is_compiled(plan: Plan) -> bool:
    """Whether a plan records compiled bytes beside the planned ones."""
    return plan.lower == "inductor" and plan.planned_peak_bytes > 0


def _is_data(cost: CostModel) -> bool:
    """Whether a cost model is data shipped with remat, so that it prices equally on every machine."""
    if isinstance(cost, Roofline):
        shipped = type(cost) in (Roofline, RooflineFused)
        return shipped and DEVICES.get(cost.device.name) == cost.device
    return type(cost) in (Flops, Unit)
