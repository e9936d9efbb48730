"""Format the figures of a plan as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from remat.report.explanation import counted
from remat.units import Budget, bytes_of_share, format_bytes, format_cost

if TYPE_CHECKING:
    from remat.planning.plan import Plan

#: Most offloaded values that are listed; the others are summed up in one line.
MOST_LISTED = 40
#: Text that says which step "without remat" is, in every text about a plan.
WITHOUT_REMAT = "is budget 1, which saves no more bytes than the runtime-optimal partition of plain torch.compile"


def rows_of(plan: Plan) -> list[tuple[str, str]]:
    """Return the figures of a plan as rows (name, text); figures without a text are left out."""
    rows = [
        ("graph", plan.of_step),
        ("region", _region(plan)),
        ("saved", _saved(plan)),
        ("raised", _raised(plan)),
        ("recomputed", _recomputed(plan)),
        ("offloaded", _offloaded(plan)),
        ("loss", plan.chunk and f"in chunks of tokens, by {plan.chunk}"),
        ("peak", _peak(plan)),
        ("simulated", _simulated(plan)),
        ("step", plan.before_after.step_text),
        ("without remat", WITHOUT_REMAT if plan.without_peak_bytes else ""),
        ("decided by", _decided_by(plan)),
    ]
    return [(name, text) for name, text in rows if text]


def _saved(plan: Plan) -> str:
    """Format the bytes that a plan saves, beside those of the runtime-optimal partition and the limits on them."""
    share = f" ({plan.saved_bytes / plan.full_bytes:.0%} of" if plan.full_bytes else " (of"
    if plan.saved_bytes > plan.full_bytes:
        share = " (more than the"
    allowed = "" if plan.asked.on_peak else f"{format_bytes(plan.capacity)} allowed, "
    return (
        f"{format_bytes(plan.saved_bytes)}{share} {format_bytes(plan.full_bytes)} that the "
        f"runtime-optimal partition saves; {allowed}{format_bytes(plan.least_bytes)} the least possible)"
    )


def _offloaded(plan: Plan) -> str:
    """Format the offloaded values, their bytes and their exposed transfer time; empty without a link."""
    if not plan.link:
        return ""
    if not plan.offloads:
        return f"nothing over {plan.link}"
    exposed = format_cost(plan.exposed_time, plan.unit) if plan.exposed_time else "none"
    return (
        f"{counted(len(plan.offloads), 'value')}, at most {format_bytes(plan.host_bytes)} in the host's memory at one "
        f"time, over {plan.link}; exposed transfer time: {exposed}"
    )


def _recomputed(plan: Plan) -> str:
    """Format the number of recomputed nodes, their cost, and the proven lower bound on this cost."""
    recomputed = counted(len(plan.recomputed), "node") if plan.recomputed else "nothing"
    if plan.recompute_cost:
        # Node orders do not list views, so `recomputed` has none then.
        views = "" if plan.decision.is_ordered else ", views included"
        proven = ""
        if plan.recompute_bound:
            bound = format_cost(plan.recompute_bound, plan.unit)
            proven = f" (no plan within the budget needs less than {bound})"
        return f"{recomputed}{views}, {format_cost(plan.recompute_cost, plan.unit)}{proven}"
    return f"{recomputed}, at no cost" if plan.recomputed else recomputed


def _peak(plan: Plan) -> str:
    """Format the peak and the peak without remat.

    For a compiled step, these are the compiled peak and an estimate; for any other step, two simulated peaks.
    """
    limit = (
        f"; a share of {plan.asked.peak_share} comes to {format_bytes(plan.peak_limit)}"
        if plan.peak_limit
        else ""
    )
    if not plan.planned_peak_bytes:
        beside = _instead_of(plan.without_peak_bytes)
        return f"{format_bytes(plan.peak_bytes)}{beside}, inputs and parameters included{limit}"
    expected = _instead_of(plan.without_expected_bytes, "about ")
    return f"{format_bytes(plan.peak_bytes)} as compiled{expected}, inputs and parameters included{limit}"


def _simulated(plan: Plan) -> str:
    """Format the simulated peak that a compiled step was planned with; empty for a step that is not compiled."""
    if not plan.planned_peak_bytes:
        return ""
    beside = _instead_of(plan.without_peak_bytes)
    return f"peak {format_bytes(plan.planned_peak_bytes)}{beside}, without fusion of operators"


def _instead_of(nbytes: int, about: str = "") -> str:
    """Format the peak without remat, to follow the peak of the plan.

    Args:
        nbytes: the peak without remat; 0 if unknown, and the result is then empty.
        about: text before the bytes, such as ``"about "``.
    """
    return f" instead of {about}{format_bytes(nbytes)} without remat" if nbytes else ""


def _decided_by(plan: Plan) -> str:
    """Format the name of the solver, the number of nodes (items) that it decided, and its time."""
    took = f"{plan.solve_s:.3f} s" if plan.solve_s >= 0.001 else "less than 1 ms"
    over = f" over {plan.items} items in {took}" if plan.items else ""
    return plan.solver + over + ("" if plan.deterministic else "; a clock ended it")


def _region(plan: Plan) -> str:
    """Format the budget that the user's code sets for the graph, with its bytes; empty if the code sets none."""
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
    """Explain why a plan saves more than the ratio of its budget allows; empty if the plan does not save more."""
    share = Budget.parse(plan.region_budget) if plan.region_budget else plan.asked
    full, least = max(plan.full_bytes, plan.least_bytes), plan.least_bytes
    known = plan.least_because and share.share is not None and plan.capacity == least
    if not known or not share.below(full=full, least=least):
        return ""
    return (
        f"{share.label} of {format_bytes(full)} is {format_bytes(bytes_of_share(share.share or 0.0, full))}; "
        f"{format_bytes(least)} is the least possible, because {plan.least_because}"
    )


def offload_lines(plan: Plan, made_by: Mapping[str, str]) -> list[str]:
    """Return a heading and one line of text for each offloaded value, largest first.

    Beyond `MOST_LISTED` values, the rest is summed up. The list is empty if the plan offloads nothing.

    Args:
        plan: the plan.
        made_by: source lines of values in the user's code, by name of the value; unknown ones may be left out.
    """
    chosen = sorted(plan.offloads, key=lambda value: (-value.nbytes, value.name))
    if not chosen:
        return []
    lines = [f"  offloaded values: {format_bytes(plan.host_bytes)} in {len(chosen)}"]
    for value in chosen[:MOST_LISTED]:
        freed = f"freed after {value.freed_after}" if value.freed_after else "freed at once"
        fetched = (
            f"fetched from {value.fetched_before} on"
            if value.fetched_before
            else "fetched when read"
        )
        line = f"{value.name}  {freed}, {fetched}  {made_by.get(value.name, '')}"
        lines.append(f"    {format_bytes(value.nbytes):>10}  {line}".rstrip())
    if len(chosen) > MOST_LISTED:
        rest = chosen[MOST_LISTED:]
        nbytes = format_bytes(sum(value.nbytes for value in rest))
        lines.append(f"    {nbytes:>10}  {len(rest)} smaller ones")
    return lines
