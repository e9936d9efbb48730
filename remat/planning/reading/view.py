"""Show a plan as text, as an HTML page, and as the data for pictures and exports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from remat.errors import RematError
from remat.graph.copying import run_of
from remat.graph.memory.host_copies import RELOAD
from remat.graph.memory.liveness import StorageKind
from remat.graph.memory.user_mutations import describe_input
from remat.graph.policies import read_policies
from remat.graph.problems.replays import maker_of
from remat.planning.reading.node_rows import kept_storages, op_name, runs_of, uses
from remat.planning.reading.plan_text import cards, offload_lines, rows_of
from remat.record import PlanRecord
from remat.report.by_module import policy_lines
from remat.report.explanation import explain
from remat.report.page_data import Page, Stop
from remat.report.step_view import (
    KEPT,
    OFFLOADED,
    RECOMPUTED,
    Clock,
    FrontierView,
    StepView,
    Value,
)
from remat.units import format_bytes, format_cost

#: Fields of a plan that are lists of node names. A plan's JSON file contains these fields, but a page does not.
_NAMES = (
    "saved", "recomputed", "snapshots", "fallbacks", "reread", "forward_order", "backward_order",
)  # fmt: skip


def explained(plan: PlanRecord) -> str:
    """Return a plan as text: bytes and costs, saved activations and recomputed operators; see `Plan.explain`."""
    graph = None
    with contextlib.suppress(RematError):  # the figures can be shown without modules, too
        graph = plan.forward.graph
    lines = [
        f"plan for {plan.graph}, budget {plan.requested.label}, cost model {plan.cost}",
        *(f"  {name:<13} {text}" for name, text in rows_of(plan)),
    ]
    if plan.fallbacks:
        lines += ["  not priced by the cost model itself:", *(f"    {t}" for t in plan.fallbacks)]
    if plan.reread:
        lines += [
            "  reads inputs again in backward that eager autograd would not have saved: who refills",
            "  one between forward and backward gets an error; reread_inputs=False leaves them alone",
            *(f"    {describe_input(graph, name) if graph else name}" for name in plan.reread),
        ]
    if plan.reread_outputs:
        places = ", ".join(map(str, plan.reread_outputs))
        lines += [
            f"  reads outputs in backward (at {places}): who writes to one before gets an error"
        ]
    if plan.copied_outputs:
        places = ", ".join(map(str, plan.copied_outputs))
        lines += [f"  returns copies of outputs (at {places}), whose numbers backward reads"]
    lines += offload_lines(plan, graph)
    if graph is not None:
        keeps, runs = kept_storages(plan), runs_of(plan)
        lines += policy_lines(read_policies(plan.policies), uses(plan, keeps, runs), plan.unit)
        lines += explain(keeps, [run for run in runs if run.again], plan.unit)
    return "\n".join(lines)


def view_step(plan: PlanRecord) -> StepView:
    """Return the data on a plan's step that pictures, pages and exports show.

    Raises:
        PlanError: the plan has no modules.
    """
    as_compiled, without = plan.is_compiled, plan.curve_without
    timeline, forward, backward = plan.timeline, plan.forward, plan.backward
    costs = plan.node_costs
    nodes = {n.name: n for gm in (backward, forward) for n in gm.graph.nodes}
    keeps = kept_storages(plan)
    rows = {k.name: k for k in keeps}
    runs = runs_of(plan)
    # By the node that made the storage and by bytes. The name of an offloaded value does not identify its storage:
    # an element of a tuple has another name than the node that made the tuple's storages.
    hosted_names = {
        (run_of(maker_of(nodes[value.name])), value.nbytes): value.name
        for value in plan.offloads
        if value.name in nodes
    }
    values = []
    for life in timeline.lifetimes:
        is_kept = life.kind is StorageKind.SAVED
        row = rows.get(life.saved_as) if is_kept else None
        node = nodes.get(life.saved_as or life.node)
        late = life.first >= timeline.boundary
        state = KEPT if is_kept else RECOMPUTED if life.kind is StorageKind.RECOMPUTED else ""
        hosted = "" if is_kept or late else hosted_names.get((life.node, life.nbytes), "")
        if hosted or (not is_kept and late and node is not None and node.target is RELOAD):
            state = OFFLOADED
        values.append(
            Value(
                name=(life.saved_as if is_kept else hosted) or life.node,
                op="" if node is None else "input" if node.op == "placeholder" else op_name(node),
                nbytes=life.nbytes,
                kind=life.kind,
                first=life.first,
                last=life.last,
                state=state,
                source=life.source or (row.source if row else ""),
                price=row.price if row else None,
                module=life.module,
                shape=_shape(node),
            )
        )
    # The lengths differ if forward or backward has no operator: a graph without operators counts as one program point.
    clock = None
    if (
        any(run.cost for run in runs)
        and not as_compiled
        and len(runs) == len(timeline.program_points)
    ):
        own = [costs.get(name, 0) for name in (without.runs if without else ())]
        clock = Clock(
            starts=list(accumulate((run.cost or 0 for run in runs), initial=0)),
            without=list(accumulate(own, initial=0)) if own else [],
            unit=plan.unit,
        )
    budget = plan.requested.peak_bytes
    shown = f"{format_bytes(budget)} of peak" if budget else plan.budget
    return StepView(
        graph=plan.graph,
        title=f"{plan.graph}, budget {shown}",
        unit=plan.unit,
        timeline=timeline,
        as_compiled=as_compiled,
        values=tuple(values),
        runs=tuple(runs),
        kept=tuple(keeps),
        without=without,
        without_peak_bytes=plan.without_estimated_bytes if as_compiled else plan.without_peak_bytes,
        peak_budget=budget or plan.peak_limit or None,
        clock=clock,
    )


def page_of(
    plans: Sequence[PlanRecord],
    plan: PlanRecord,
    *,
    title: str = "",
    bytes_of: Callable[[PlanRecord], int] | None = None,
    knee: PlanRecord | None = None,
    curve: FrontierView | None = None,
    frontier: str = "null",
) -> Page:
    """Return the HTML page that explains a plan, with a slider over several plans.

    Args:
        plans: the plans of the slider, fewest bytes first; these include ``plan``.
        plan: the plan that the page shows first.
        title: title of the page; empty: the name of the graph.
        bytes_of: returns the bytes of a plan on the axis of the frontier; None: without a frontier.
        knee: the plan at the knee of the frontier; None: no frontier.
        curve: the frontier to draw; None: no frontier.
        frontier: JSON text of the frontier.
    """
    suffix = ", as asked for" if bytes_of else ""
    return Page(
        title=title or plan.graph,
        lead=f"Cost model {plan.cost}; decided by {plan.solver}.",
        stops=[
            Stop(
                label=f"Plan at budget {p.requested.label}{suffix if p is plan else ''}",
                spoken=f"{format_bytes(p.saved_bytes)} kept, {format_cost(p.recompute_cost, p.unit)} "
                f"recomputed, peak {format_bytes(p.peak_bytes)}",
                cards=cards(p),
                rows=[("budget", p.requested.label), ("cost model", p.cost), *rows_of(p)],
                view=view_step(p),
                point=(bytes_of(p) if bytes_of else p.saved_bytes, p.added_cost),
            )
            for p in plans
        ],
        start=plans.index(plan),
        knee=plans.index(knee or plan),
        curve=curve,
        figures={
            "plan": figures_of(plan),
            "frontier": json.loads(frontier),
            "plans": [figures_of(p) for p in plans],
        },
    )


def figures_of(plan: PlanRecord) -> dict[str, Any]:
    """Return a dict from a plan's field names to values, as in the plan's JSON, without lists of node names."""
    return {k: v for k, v in json.loads(plan.to_json()).items() if k not in _NAMES}


def _shape(node: fx.Node | None) -> str:
    """Return the dtype and shape of a node's value as text, such as ``"float32[8, 16]"``; empty if unknown."""
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
