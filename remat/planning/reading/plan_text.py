"""Format a plan's bytes, costs and peaks as text."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from remat.graph.capture.source import source_line
from remat.graph.memory.storages import expression_of, has_symbols, hint, numbers_of
from remat.record import PlanRecord
from remat.units import Budget, bytes_of_share, counted, format_bytes, format_cost

#: Most rows of a text about a set of plans or a frontier, so that the text fits one screen; also the stops of a slider.
MOST_SHOWN = 16
#: Most offloaded values that a text lists one by one. One more line counts the others and sums up their bytes.
MOST_LISTED = 40
#: Text that explains "without remat" to readers of a plan's text.
WITHOUT_REMAT = "is budget 1, which saves no more bytes than the runtime-optimal partition of plain torch.compile"


def summary(plan: PlanRecord) -> str:
    """Return a plan as one line of text: saved bytes, recompute cost, solver and peak."""
    compiled = ""
    if plan.planned_peak_bytes:
        compiled = f"{format_bytes(plan.peak_bytes)} as compiled; simulated, "
    return (
        f"<plan for {plan.graph}: {format_bytes(plan.saved_bytes)} saved, "
        f"{format_cost(plan.recompute_cost, plan.unit)} recomputed, by {plan.solver}; "
        f"peak {compiled}{plan.before_after.line}>"
    )


def rows_of(plan: PlanRecord) -> list[tuple[str, str]]:
    """Return a plan's bytes and costs as pairs (name, text), such as ``("recomputed", "3 nodes, at no cost")``.

    Pairs that do not apply to the plan, such as ``"offloaded"`` without a link, are left out.
    """
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
        ("searched", plan.search),
    ]
    return [(name, text) for name, text in rows if text]


def _saved(plan: PlanRecord) -> str:
    """Format the bytes that a plan saves, and three other numbers of saved bytes for comparison."""
    share = f" ({plan.saved_bytes / plan.full_bytes:.0%} of" if plan.full_bytes else " (of"
    if plan.saved_bytes > plan.full_bytes:
        share = " (more than the"
    allowed = "" if plan.requested.on_peak else f"{format_bytes(plan.capacity)} allowed, "
    return (
        f"{format_bytes(plan.saved_bytes)}{share} {format_bytes(plan.full_bytes)} that the "
        f"runtime-optimal partition saves; {allowed}{format_bytes(plan.least_bytes)} the least possible)"
    )


def _offloaded(plan: PlanRecord) -> str:
    """Format the number, bytes and exposed transfer time of a plan's offloaded values; empty without a link."""
    if not plan.link:
        return ""
    if not plan.offloads:
        return f"nothing over {plan.link}"
    exposed = format_cost(plan.exposed_time, plan.unit) if plan.exposed_time else "none"
    return (
        f"{counted(len(plan.offloads), 'value')}, at most {format_bytes(plan.host_bytes)} in the host's memory at one "
        f"time, over {plan.link}; exposed transfer time: {exposed}"
    )


def _recomputed(plan: PlanRecord) -> str:
    """Format the number of recomputed nodes, their cost, and the proven lower bound on this cost."""
    recomputed = counted(len(plan.recomputed), "node") if plan.recomputed else "nothing"
    if plan.recompute_cost:
        # A decision with node orders does not list views, so `recomputed` then contains no views.
        views = "" if plan.decision.is_ordered else ", views included"
        proven = ""
        if plan.recompute_bound:
            bound = format_cost(plan.recompute_bound, plan.unit)
            proven = f" (no plan within the budget needs less than {bound})"
        return f"{recomputed}{views}, {format_cost(plan.recompute_cost, plan.unit)}{proven}"
    return f"{recomputed}, at no cost" if plan.recomputed else recomputed


def _peak(plan: PlanRecord) -> str:
    """Format the peaks of a step with and without remat: simulated peaks unless the step was compiled."""
    limit = (
        f"; a share of {plan.requested.peak_share} comes to {format_bytes(plan.peak_limit)}"
        if plan.peak_limit
        else ""
    )
    if not plan.planned_peak_bytes:
        comparison = _instead_of(plan.without_peak_bytes)
        return f"{format_bytes(plan.peak_bytes)}{comparison}, inputs and parameters included{limit}"
    # The plan for budget 1 is the step without remat: its own estimate would contradict its compiled peak.
    is_without = plan.requested.share == 1
    estimated = "" if is_without else _instead_of(plan.without_estimated_bytes, "about ")
    return f"{format_bytes(plan.peak_bytes)} as compiled{estimated}, inputs and parameters included{limit}"


def _simulated(plan: PlanRecord) -> str:
    """Format the simulated peak that planning computed for a compiled step; empty if the step is not compiled."""
    if not plan.planned_peak_bytes:
        return ""
    comparison = _instead_of(plan.without_peak_bytes)
    return f"peak {format_bytes(plan.planned_peak_bytes)}{comparison}, without fusion of operators"


def _instead_of(nbytes: int, about: str = "") -> str:
    """Return a clause such as " instead of 5.1 GiB without remat"; empty if ``nbytes`` is 0, for an unknown peak."""
    return f" instead of {about}{format_bytes(nbytes)} without remat" if nbytes else ""


def _decided_by(plan: PlanRecord) -> str:
    """Format a plan's solver: its name, the number of nodes among which it chose, and its time."""
    took = f"{plan.solve_s:.3f} s" if plan.solve_s >= 0.001 else "less than 1 ms"
    over = f" over {plan.items} items in {took}" if plan.items else ""
    return plan.solver + over + ("" if plan.deterministic else "; a clock ended it")


def _region(plan: PlanRecord) -> str:
    """Format the budget that the user's code sets for the graph, with its bytes; empty if the code sets none."""
    if not plan.region_budget:
        return ""
    share = Budget.parse(plan.region_budget)
    own = share.capacity(full_bytes=max(plan.full_bytes, plan.least_bytes), least=plan.least_bytes)
    return (
        f"the code sets {plan.region_budget} for the whole graph by "
        f"region_activation_memory_budget, {format_bytes(own)}; it holds "
        f"{'beside' if plan.requested.share is None else 'instead of'} the budget"
    )


def _raised(plan: PlanRecord) -> str:
    """Return a text on a budget whose ratio allows fewer bytes than every plan saves; empty for any other budget."""
    share = Budget.parse(plan.region_budget) if plan.region_budget else plan.requested
    full_bytes, least = max(plan.full_bytes, plan.least_bytes), plan.least_bytes
    is_raised = plan.least_because and share.share is not None and plan.capacity == least
    if not is_raised or not share.below(full_bytes=full_bytes, least=least):
        return ""
    return (
        f"{share.label} of {format_bytes(full_bytes)} is {format_bytes(bytes_of_share(share.share or 0.0, full_bytes))}; "
        f"{format_bytes(least)} is the least possible, because {plan.least_because}"
    )


def cards(plan: PlanRecord) -> list[tuple[str, str, str]]:
    """Return a plan's main numbers for an HTML page, each as three texts: name, value and comparison.

    A comparison is, for example, ``"8 GiB at budget 1"``, or the proven bound on the cost.
    """
    both = plan.before_after
    compiled, others = "", format_bytes(both.without_peak_bytes) if both.without_peak_bytes else ""
    if plan.planned_peak_bytes:
        estimated = plan.without_estimated_bytes
        compiled = " as compiled"
        others = f"{format_bytes(estimated)} expected" if estimated else ""
    step = without = "not known"
    if both.step_cost:
        step, without = (format_cost(c, both.unit) for c in (both.cost, both.without_cost))
    bound = "no bound is proven"
    if plan.recompute_bound or not plan.recompute_cost:
        bound = f"proven bound {format_cost(plan.recompute_bound, plan.unit)}"
    return [
        (f"Peak{compiled}", format_bytes(plan.peak_bytes), _without_remat(others)),
        ("Step, modelled", step, _without_remat(without if both.more is not None else "")),
        (
            "Kept for backward",
            format_bytes(plan.saved_bytes),
            f"{format_bytes(plan.full_bytes)} at budget 1",
        ),
        ("Recomputed", format_cost(plan.recompute_cost, plan.unit), bound),
    ]


def _without_remat(without: str) -> str:
    """Return a text such as ``"8 GiB without remat"``, or ``"without remat: not known"``."""
    return f"{without} without remat" if without else "without remat: not known"


def offload_lines(plan: PlanRecord, graph: fx.Graph | None) -> list[str]:
    """Return lines of text on the values that a plan offloads: a heading, then one line per value, largest first.

    After `MOST_LISTED` values, one line sums up the remaining values. The list is empty if the plan offloads nothing.

    Args:
        plan: the plan.
        graph: the forward graph, for lines of the user's code; None if unknown.
    """
    chosen = sorted(plan.offloads, key=lambda value: (-value.nbytes, value.name))
    if not chosen:
        return []
    made_by = {node.name: source_line(node) for node in graph.nodes} if graph else {}
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


def learned_text(nodes: Iterable[fx.Node]) -> str:
    """Return a text for budget errors on the numbers that stand for data-dependent sizes; empty without such sizes.

    Args:
        nodes: the nodes of a graph. The first node with a size gives the line of the user's code.
    """
    texts: dict[str, str] = {}
    for node in nodes:
        for size in numbers_of(node.meta.get("val")):
            for symbol in getattr(expression_of(size), "free_symbols", ()):
                learned = size.node.shape_env.create_symintnode(symbol, hint=None)
                if symbol.name not in texts and has_symbols([learned], learned=True):
                    texts[symbol.name] = f"{symbol.name} ({source_line(node)}) as {hint(learned):,}"
    if not texts:
        return ""
    return (
        f". A size that depends on data counts by a number: {', '.join(texts.values())}. A bound in the model's code, "
        "torch._check(size <= N), makes it N at most"
    )
