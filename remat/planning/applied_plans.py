"""Check a saved plan on its graph: recompute its figures, and refuse a plan with a false figure.

The figures of a plan are its bytes and costs. Recorded figures are compared with recomputed ones only if the process
that saved the plan and this process compute them in the same way. That requires the same versions of remat and PyTorch,
the same lowering, no symbolic sizes, no hooks on saved tensors, and no user pipeline. Costs are compared only if the
cost model is data that ships with remat, because measured costs differ between measurements. If a recorded figure
cannot be compared, the recomputed one replaces it. The budget is checked in both cases.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from remat.errors import PlanError, ProblemError
from remat.graph.costs import CostModel, Roofline
from remat.graph.costs.counting import Flops, Unit
from remat.graph.costs.devices import DEVICES
from remat.graph.costs.fused import RooflineFused
from remat.graph.costs.links import Link
from remat.graph.memory.liveness import own_outputs, simulate_peak
from remat.graph.memory.storages import has_symbols, workspace_of
from remat.passes.core.state import State
from remat.planning.pipelines import split
from remat.planning.plan import Plan
from remat.planning.request import PlanRequest
from remat.planning.search.offload_copies import Copies
from remat.planning.search.offload_costs import Times
from remat.version import __version__


def edited(plan: Plan, fault: str) -> PlanError:
    """Return the error that refuses a saved plan because one of its figures is false.

    Args:
        plan: the saved plan.
        fault: part of the message: which figure is false, what the plan records, and what was recomputed.
    """
    return PlanError(
        f"this plan for '{plan.graph}' is not as it was saved: {fault}; plan again with remat.plan(joint, …)"
    )


def exposed_time(prepared: State, plan: Plan, request: PlanRequest) -> int:
    """Recompute the exposed transfer time of a saved plan: the time for which operators wait for copies.

    Args:
        prepared: the prepared graph, before it is split into forward and backward.
        plan: the saved plan.
        request: the options under which the plan is applied, with the plan's cost model.

    Returns:
        The time in ps; 0 if the plan offloads nothing.

    Raises:
        PlanError: the graph cannot offload a value as the plan says; the plan's cost model gives no times; the plan's
            link cannot be parsed; or the recorded time is false. That is, it can be compared with the recomputed time
            (see the module's docstring) and differs, or it is not 0 although the plan offloads nothing.
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
    _check_offloads(plan, of_name)
    if request.cost.unit != "ps":
        raise edited(
            plan,
            f"its cost model is {plan.cost}, whose unit is {request.cost.unit}, and offloading is planned by times",
        )
    try:
        link = Link.parse(plan.link)
    except ProblemError as error:
        raise edited(plan, f"link: {error}") from None
    # Split without the recorded places, so that each value is offloaded right after its last use. `Copies` expects such
    # graphs, and applies the recorded places itself.
    unplaced = tuple(replace(v, freed_after="", fetched_before="") for v in plan.offloads)
    done = split(replace(prepared, decision=replace(plan.decision, offloads=unplaced)))
    try:
        exposed_time = Copies(
            done, plan.offloads, link, Times.of(prepared, request.cost)
        ).exposed_time()
    except (PlanError, ProblemError) as error:
        raise edited(plan, str(error)) from None
    if (
        _is_alike(plan, prepared.joint.lower)
        and not has_symbols(prepared.index.values)
        and _is_data(request.cost)
        and exposed_time != plan.exposed_time
    ):
        raise edited(
            plan,
            f"exposed_time is {plan.exposed_time} ps in it, and runs wait {exposed_time} ps for its copies",
        )
    return exposed_time


def _check_offloads(plan: Plan, sizes: dict[str, int]) -> None:
    """Check that a plan lists each offloaded value once, saves it, and records the bytes that it has in the graph.

    The operators at which copies are placed are not checked here.

    Args:
        plan: the saved plan.
        sizes: bytes of each node's storage in the graph, by node name.

    Raises:
        PlanError: an offloaded value is listed twice, is not among the saved values, or has another size in the graph.
    """
    seen, saved = set(), set(plan.saved)
    for value in plan.offloads:
        if value.name in seen:
            raise edited(plan, f"'{value.name}' is offloaded twice in it")
        seen.add(value.name)
        if value.name not in saved or value.name not in sizes:
            fault = f"'{value.name}' is offloaded in it, and is not among what it saves"
            raise edited(plan, fault)
        if value.nbytes != sizes[value.name]:
            fault = f"'{value.name}' has {value.nbytes} bytes in it, and {sizes[value.name]} in the graph"
            raise edited(plan, fault)


def check_applied(plan: Plan, made: Plan, request: PlanRequest) -> None:
    """Refuse a saved plan that has a false figure, or whose step exceeds the plan's budget.

    Args:
        plan: the saved plan.
        made: the plan that results from applying ``plan`` to its graph, with recomputed figures.
        request: the options under which the plan is applied, with the plan's cost model.

    Raises:
        PlanError: a figure of ``plan`` that can be compared (see the module's docstring) differs from the recomputed
            one, or the step exceeds the budget.
    """
    if plan.unit != made.unit:
        raise edited(plan, f"unit is {plan.unit} in it, and its costs are in {made.unit}")
    # With symbolic sizes, each process computes figures for the sizes that it traced with, so figures may differ.
    if _is_alike(plan, made.lower) and not made.symbolic:
        # Pairs of fields: a field of `plan` with a recorded figure, and the field of `made` to compare it with.
        figures: list[tuple[str, str]] = []
        planned = "planned_" if _is_compiled(plan) else ""
        if request.hooks is None:
            figures.append((f"{planned}saved_bytes", "saved_bytes"))
            if not _has_workspaces(made):
                figures.append((f"{planned}peak_bytes", "peak_bytes"))
        if _is_data(request.cost):
            figures += [("recompute_cost", "recompute_cost"), ("step_cost", "step_cost")]
        for name, figure in figures:
            claimed, found = getattr(plan, name), getattr(made, figure)
            # One graph may hand a view to another graph. Its whole storage counts where the step was captured, but its
            # own bytes alone where Inductor compiles the graph.
            several = request.of_several and made.lower == "inductor"
            is_view = several and figure == "peak_bytes" and claimed > found
            if claimed != found and not is_view:
                fault = f"{name} is {claimed} in it, and {found} in the step that it makes"
                raise edited(plan, fault)
        # The recorded peak cannot be below the peak of the storages alone, without workspaces, which is equal on every
        # machine. This does not hold with hooks, because they may pack saved values into fewer bytes.
        least = 0
        if request.hooks is None:
            outputs = own_outputs(made.forward)
            least = simulate_peak(made.forward, made.backward, outputs, workspaces=False)
        if plan.peak_bytes < least and not _is_compiled(plan):
            raise edited(
                plan, f"peak_bytes is {plan.peak_bytes} in it, and storages alone take {least}"
            )
    # With symbolic sizes, the caller checks the budget, because it knows the sizes that the step runs with.
    fault = "" if made.symbolic else _above_budget(plan, made, alone=not request.of_several)
    if fault:
        raise PlanError(f"this plan for '{plan.graph}' does not keep its budget: {fault}")


def _has_workspaces(made: Plan) -> bool:
    """Return whether a plan's peak includes workspaces: buffers that operators allocate internally.

    Their sizes depend on the machine.
    """
    graphs = (made.forward, made.backward)
    return any(workspace_of(node) is not None for gm in graphs for node in gm.graph.nodes)


def _above_budget(plan: Plan, made: Plan, *, alone: bool) -> str:
    """Return a part of a message: how the step of a saved plan exceeds the plan's budget. Empty if it does not.

    A budget in saved bytes is compared with the recomputed saved bytes. A budget on the peak is compared with a peak
    that depends on the plan:

    - A plan that records the peak of its compiled step: the lower of the recomputed peak and the recorded one, because
      this process has not compiled the step yet. If the budget is a ratio of the peak, nothing is checked.
    - Any other plan for Inductor: the lower of the recomputed peak and the estimated peak of fused code.
    - A plan for eager execution: the recomputed peak.

    A budget on the peak that several graphs share is not checked, because the peak of the step cannot be computed from
    one graph.

    Args:
        plan: the saved plan.
        made: the plan that results from applying ``plan`` to its graph.
        alone: whether the budget is for this graph alone.
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
    if _is_compiled(plan):  # a compiled step keeps a ratio only approximately, so it is not checked
        peak = min(peak, plan.peak_bytes) if asked.peak_bytes else 0
    elif peak > limit and made.lower == "inductor":
        peak = min(peak, made.predicted_peak_bytes)
    if peak <= limit:
        return ""
    return (
        f"budget is {asked} in it, {limit} bytes, and the step that it makes has a peak of {peak} bytes; plan "
        f"again within {asked}. If it is one of several graphs' plans under one budget, apply their PlanSet"
    )


def _is_alike(plan: Plan, lower: str) -> bool:
    """Return whether a plan was made for the lowering ``lower``, and by the versions of remat and PyTorch in use."""
    return (plan.remat, plan.torch, plan.lower) == (__version__, torch.__version__, lower)


def _is_compiled(plan: Plan) -> bool:
    """Return whether a plan records the compiled peak of the step in ``peak_bytes``, besides the simulated peak."""
    return plan.lower == "inductor" and plan.planned_peak_bytes > 0


def _is_data(cost: CostModel) -> bool:
    """Return whether a cost model computes costs only from data that ships with remat.

    Such costs are equal on every machine.
    """
    if isinstance(cost, Roofline):
        shipped = type(cost) in (Roofline, RooflineFused)
        return shipped and DEVICES.get(cost.device.name) == cost.device
    return type(cost) in (Flops, Unit)
