"""Check a saved plan on its graph: refuse offloads that the graph does not allow, and a step above the budget.

The bytes and costs of an applied plan are computed on the graph. The computed bytes and costs are not compared with
those in the plan's file, which depend on the machine and, with symbolic sizes, on the traced sizes.
"""

from __future__ import annotations

from dataclasses import replace

from remat.errors import PlanError, ProblemError
from remat.graph.costs.links import Link
from remat.passes.core.state import State
from remat.planning.pipelines import split
from remat.planning.plan import Plan
from remat.planning.request import PlanRequest
from remat.planning.search.offload_copies import Copies
from remat.planning.search.offload_costs import Times


def exposed_time(prepared: State, plan: Plan, request: PlanRequest) -> int:
    """Compute the exposed transfer time of a saved plan on a prepared graph, in ps; 0 if the plan offloads nothing.

    Raises:
        PlanError: the graph cannot offload a value that the plan offloads, the plan's cost model gives no times, or the
            plan's link cannot be parsed.
    """
    if not plan.offloads:
        return 0
    sizes = prepared.storages.nbytes
    of_name = {
        n.name: sizes[prepared.storages.owner[i]] for i, n in enumerate(prepared.index.nodes)
    }
    _check_offloads(plan, of_name)
    if request.cost.unit != "ps":
        raise _refused(
            plan,
            f"its cost model is {plan.cost}, whose unit is {request.cost.unit}, and offloading is planned by times",
        )
    # Split without the recorded places, so that each value is offloaded right after its last use. `Copies` expects such
    # graphs, and applies the recorded places itself.
    unplaced = tuple(replace(v, freed_after="", fetched_before="") for v in plan.offloads)
    state = split(replace(prepared, decision=replace(plan.decision, offloads=unplaced)))
    try:
        link = Link.parse(plan.link)
        return Copies(state, plan.offloads, link, Times.of(prepared, request.cost)).exposed_time()
    except (PlanError, ProblemError) as error:
        raise _refused(plan, str(error)) from None


def _check_offloads(plan: Plan, sizes: dict[str, int]) -> None:
    """Raise a PlanError if an offloaded value is listed twice, is not saved, or has another size in the graph."""
    seen, saved = set(), set(plan.saved)
    for value in plan.offloads:
        if value.name in seen:
            raise _refused(plan, f"'{value.name}' is offloaded twice in it")
        seen.add(value.name)
        if value.name not in saved or value.name not in sizes:
            fault = f"'{value.name}' is offloaded in it, and is not among what it saves"
            raise _refused(plan, fault)
        if value.nbytes != sizes[value.name]:
            fault = f"'{value.name}' has {value.nbytes} bytes in it, and {sizes[value.name]} in the graph"
            raise _refused(plan, fault)


def _refused(plan: Plan, fault: str) -> PlanError:
    """Return the error that refuses a saved plan because of ``fault``, such as another size of an offloaded value."""
    return PlanError(
        f"this plan for '{plan.graph}' is not as it was saved: {fault}; plan again with remat.plan(joint, …)"
    )


def check_applied(plan: Plan, applied: Plan, *, alone: bool) -> None:
    """Refuse a saved plan whose step exceeds the plan's budget, or whose costs have another unit.

    Args:
        plan: the saved plan.
        applied: the plan that results from applying ``plan`` to its graph, with bytes and costs of the graph.
        alone: whether the budget is for this graph alone.

    Raises:
        PlanError: the step exceeds the budget, or a plugin's cost model of the same name now gives costs in another
            unit.
    """
    if plan.unit != applied.unit:  # figures of the step without remat come from the file
        raise _refused(plan, f"unit is {plan.unit} in it, and its costs are in {applied.unit}")
    budget, fault = plan.requested, ""
    limit = budget.peak_bytes or (plan.peak_limit if budget.on_peak else 0)
    if applied.symbolic:
        return  # the caller checks the budget: it knows the sizes that the step runs with
    if budget.nbytes is not None and applied.saved_bytes > budget.nbytes:
        fault = (
            f"budget is {budget} in it, and the step that it makes saves {applied.saved_bytes} bytes; plan again "
            f"within {budget}"
        )
    # The peak of a step of several graphs cannot be computed from one of them.
    elif limit and alone and (peak := _counted_peak(plan, applied, limit)) > limit:
        fault = (
            f"budget is {budget} in it, {limit} bytes, and the step that it makes has a peak of {peak} bytes; plan "
            f"again within {budget}. If it is one of several graphs' plans under one budget, apply their PlanSet"
        )
    if fault:
        raise PlanError(f"this plan for '{plan.graph}' does not keep its budget: {fault}")


def _counted_peak(plan: Plan, applied: Plan, limit: int) -> int:
    """Return the peak of an applied plan, in bytes, that `check_applied` compares with the budget."""
    if plan.lower == "inductor" and plan.planned_peak_bytes:
        # The plan has the peak of its compiled step, and this process has not compiled the step yet. A compiled step meets
        # a ratio of the peak only approximately, so nothing is compared with a ratio.
        return min(applied.peak_bytes, plan.peak_bytes) if plan.requested.peak_bytes else 0
    if applied.peak_bytes > limit and applied.lower == "inductor":
        return min(applied.peak_bytes, applied.estimated_peak_bytes)
    return applied.peak_bytes
