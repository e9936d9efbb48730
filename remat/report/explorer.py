"""The explorer of one plan: a page with its step, and a slider over a frontier."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.errors import PeakWarning
from remat.report.page import Page, require_bokeh, write_page
from remat.report.page_data import Curve, Stop
from remat.units import format_bytes, format_cost

if TYPE_CHECKING:
    from remat.planning.frontier import Frontier
    from remat.planning.plan import Plan

#: Points of a frontier that the slider stops at.
STOPS = 16
#: Fields of a plan that are lists of names: they stand in saved plans, not in pages.
_NAMES = (
    "saved", "recomputed", "snapshots", "fallbacks", "reread", "forward_order", "backward_order",
)  # fmt: skip
_NO_FRONTIER = (
    "There is no slider: the page was made of this plan alone. For one, hand over a frontier of its graph, "
    "plan.explore(path, frontier=remat.frontier(joint)), or use the command remat explain MODEL --html FILE."
)
_AXIS = {"saved": "saved for backward", "peak": "peak of the step"}


def figures_of(plan: Plan) -> dict[str, Any]:
    """The figures of a plan by name, as its JSON has them, without lists of names."""
    return {k: v for k, v in json.loads(plan.to_json()).items() if k not in _NAMES}


def explore(
    plan: Plan,
    path: str | Path,
    *,
    frontier: Frontier | None = None,
    title: str = "",
    on_step: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Writes a page that explains a plan: memory over the step, what is kept, what runs again.

    It is one file, loads nothing, and needs no server.

    Args:
        plan: the plan.
        path: where to; ``.html``.
        frontier: of the same graph and cost model: the page has a slider over it.
        title: what the page is about; the name of the graph where empty.
        on_step: called with a line of text before each plan that is made for it.

    Returns:
        All figures of the page, which stand in it as JSON.

    Raises:
        PlanError: Bokeh is not installed, the plan was read from a file, or the file cannot be written.
        ProblemError: the frontier is of another graph or cost model.
    """
    require_bokeh()
    plans = [plan]
    if frontier is not None:
        frontier.check_same(plan)
        plans = _along(frontier, plan, on_step)
    figures = {
        "plan": figures_of(plan),
        "frontier": None if frontier is None else json.loads(frontier.to_json()),
        "plans": [figures_of(p) for p in plans],
    }
    stops = [stop_of(p, p is plan, frontier) for p in plans]
    knee = None if frontier is None else _knee(frontier, plans)
    by = "saved" if frontier is None else frontier.by
    page = Page(
        title=title or plan.graph,
        lead=f"Cost model {plan.cost}; decided by {plan.solver}.",
        stops=stops,
        start=plans.index(plan),
        slider=(f"Plans along the frontier by {by}", "less memory", "less recomputing"),
        knee=knee,
        no_slider=_NO_FRONTIER
        if frontier is None
        else "There is no slider: the frontier has one plan only.",
        curve=None if frontier is None else curve_of(frontier),
        without=stops[plans.index(plan)].view.without,
        figures=figures,
    )
    write_page(page, path)
    return figures


def _along(frontier: Frontier, plan: Plan, on_step: Callable[[str], None] | None) -> list[Plan]:
    """Plans at points of a frontier, with the plan itself at its place among them."""
    points = frontier.thinned(STOPS)
    made: list[Plan] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PeakWarning)  # the page shows the peak of the plan itself
        for k, point in enumerate(points, 1):
            if on_step is not None:
                on_step(f"plan {k} of {len(points)} along the frontier")
            made.append(frontier.plan(point))
    others = [p for p in made if _decided(p) != _decided(plan)]
    return sorted([*others, plan], key=lambda p: (frontier.bytes_of(p), -_added(p)))


def _decided(plan: Plan) -> tuple[object, ...]:
    return plan.saved, plan.recomputed, plan.offloads


def _added(plan: Plan) -> int:
    """Cost of a plan beside the step: recomputation and exposed transfer time."""
    return plan.recompute_cost + plan.before_after.exposed_time


def _knee(frontier: Frontier, plans: Sequence[Plan]) -> int:
    knee = frontier.knee()
    wanted = (frontier.bytes_of(knee), knee.recompute_cost)
    found = [k for k, p in enumerate(plans) if (frontier.bytes_of(p), _added(p)) == wanted]
    near = min(
        range(len(plans)), key=lambda k: abs(frontier.bytes_of(plans[k]) - frontier.bytes_of(knee))
    )
    return found[0] if found else near


def curve_of(frontier: Frontier) -> Curve:
    points = [
        (
            frontier.bytes_of(p),
            p.recompute_cost,
            f"{format_bytes(p.saved_bytes)} saved\n{format_cost(p.recompute_cost, frontier.unit)} recomputed\n"
            f"peak {format_bytes(p.peak_bytes)}",
        )
        for p in frontier.points
    ]
    least = min(p[0] for p in points)
    shown = frontier.bound if any(nbytes >= least for nbytes, _ in frontier.bound) else ()
    return Curve(points=points, bound=shown, axis=_AXIS[frontier.by], unit=frontier.unit)


def stop_of(plan: Plan, asked: bool, frontier: Frontier | None) -> Stop:
    label, view = plan.asked.label, plan.view
    return Stop(
        label=f"Plan at budget {label}" + (", as asked for" if asked and frontier else ""),
        spoken=f"{format_bytes(plan.saved_bytes)} kept, {format_cost(plan.recompute_cost, plan.unit)} recomputed, "
        f"peak {format_bytes(plan.peak_bytes)}",
        view=view,
        figures=figures_of(plan),
        rows=[("budget", label), ("cost model", plan.cost), *plan.rows],
        before_after=plan.before_after,
        point=(frontier.bytes_of(plan) if frontier else plan.saved_bytes, _added(plan)),
    )
