"""The figures of a plan for people: the name of each, and what there is to say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from remat.report.explanation import counted
from remat.report.ways import ways_row
from remat.units import Budget, bytes_of_share, format_bytes, format_cost

if TYPE_CHECKING:
    from remat.planning.plan import Plan

#: What is meant by "without remat" wherever it stands.
WITHOUT_REMAT = "is budget 1: the plan within the bytes that PyTorch's partitioner starts from in plain torch.compile"


def rows_of(plan: Plan) -> list[tuple[str, str]]:
    """The rows of a plan's table; those with nothing to say are left out."""
    rows = [
        ("region", _region(plan)),
        ("saved", _saved(plan)),
        ("raised", _raised(plan)),
        ("recomputed", _recomputed(plan)),
        ("ways", _ways(plan)),
        ("peak", _peak(plan)),
        ("step", plan.before_after.step_text),
        ("without remat", WITHOUT_REMAT if plan.without_peak_bytes else ""),
        ("decided by", _decided_by(plan)),
        ("chosen", plan.tuned),
    ]
    return [(name, text) for name, text in rows if text]


def _saved(plan: Plan) -> str:
    share = f" ({plan.saved_bytes / plan.full_bytes:.0%} of" if plan.full_bytes else " (of"
    allowed = "" if plan.asked.on_peak else f"{format_bytes(plan.capacity)} allowed, "
    return (
        f"{format_bytes(plan.saved_bytes)}{share} {format_bytes(plan.full_bytes)} that the "
        f"runtime-optimal partition saves; {allowed}{format_bytes(plan.least_bytes)} the least possible)"
    )


def _ways(plan: Plan) -> str:
    if plan.link and not plan.ways:
        return f"nothing offloaded over {plan.link}: no plan that does was found cheaper"
    return ways_row(plan.ways, plan.waited, plan.link, partial(format_cost, unit=plan.unit))


def _recomputed(plan: Plan) -> str:
    recomputed = counted(len(plan.recomputed), "node") if plan.recomputed else "nothing"
    if plan.recompute_cost:
        views = "" if plan.decision.is_ordered else ", views included"
        proven = ""
        if plan.recompute_bound:
            bound = format_cost(plan.recompute_bound, plan.unit)
            proven = f" (no plan within the budget needs less than {bound})"
        return f"{recomputed}{views}, {format_cost(plan.recompute_cost, plan.unit)}{proven}"
    return f"{recomputed}, at no cost" if plan.recomputed else recomputed


def _peak(plan: Plan) -> str:
    """The peak, beside that without remat: compiled with expected, simulated with simulated."""
    instead = ""
    if plan.without_peak_bytes:
        instead = f" instead of {format_bytes(plan.without_peak_bytes)} without remat"
    limit = (
        f"; a share of {plan.asked.peak_share} comes to {format_bytes(plan.peak_limit)}"
        if plan.peak_limit
        else ""
    )
    if not plan.planned_peak_bytes:
        return f"{format_bytes(plan.peak_bytes)}{instead}, inputs and parameters included{limit}"
    beside = ""
    if plan.without_expected_bytes:
        beside = f", where {format_bytes(plan.without_expected_bytes)} is expected without remat"
    return (
        f"{format_bytes(plan.peak_bytes)} as compiled{beside}, inputs and parameters included; before that, "
        f"{format_bytes(plan.planned_peak_bytes)} simulated{instead}{limit}"
    )


def _decided_by(plan: Plan) -> str:
    took = f"{plan.solve_s:.3f} s" if plan.solve_s >= 0.001 else "less than 1 ms"
    over = f" over {plan.items} items in {took}" if plan.items else ""
    return plan.solver + over + ("" if plan.deterministic else "; a clock ended it")


def _region(plan: Plan) -> str:
    """What the code set for its region, and how much that is; empty where it set nothing."""
    if not plan.region_budget:
        return ""
    share = Budget.parse(plan.region_budget)
    own = share.capacity(full=max(plan.full_bytes, plan.least_bytes), least=plan.least_bytes)
    return (
        f"the code sets {plan.region_budget} for the whole graph by "
        f"region_activation_memory_budget, {format_bytes(own)}; it holds "
        f"{'beside' if plan.asked.share is None else 'instead of'} the budget"
    )


def _raised(plan: Plan) -> str:
    """What a share was raised to and why; empty where it was not raised."""
    share = Budget.parse(plan.region_budget) if plan.region_budget else plan.asked
    full, least = max(plan.full_bytes, plan.least_bytes), plan.least_bytes
    known = plan.least_because and share.share is not None and plan.capacity == least
    if not known or not share.below(full=full, least=least):
        return ""
    return (
        f"{share.label} of {format_bytes(full)} is {format_bytes(bytes_of_share(share.share or 0.0, full))}; "
        f"{format_bytes(least)} is the least possible, because {plan.least_because}"
    )
