"""HTML page that shows a step under one plan, with a slider that selects other plans of a frontier."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from remat.errors import PeakWarning, PlanError
from remat.files import write_file
from remat.report.page import page_of, require_bokeh
from remat.report.page_data import Curve, Page, Stop
from remat.units import format_bytes, format_cost

if TYPE_CHECKING:
    from remat.planning.plan import Plan

#: Largest number of points of a frontier for which the slider has a plan.
STOPS = 16
#: Fields of a plan that are lists of node names. A plan's JSON file contains these fields, but a page does not.
_NAMES = (
    "saved", "recomputed", "snapshots", "fallbacks", "reread", "forward_order", "backward_order",
)  # fmt: skip


def figures_of(plan: Plan) -> dict[str, Any]:
    """Return a dict from name to value of a plan's fields, as in the plan's JSON, without lists of node names."""
    return {k: v for k, v in json.loads(plan.to_json()).items() if k not in _NAMES}


class Plans(Protocol):
    """Plans over all budgets, as a frontier holds them; see `remat.planning.frontier.Frontier`."""

    @property
    def by(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def points(self) -> Sequence[Any]: ...
    @property
    def bound(self) -> Sequence[tuple[int, int]]: ...
    def bytes_of(self, point: Any) -> int: ...
    def knee(self) -> Any: ...
    def thinned(self, rows: int) -> list[Any]: ...
    def plan(self, point: Any) -> Plan: ...
    def check_same(self, plan: Plan) -> None: ...
    def to_json(self) -> str: ...


def explore(
    plan: Plan,
    path: str | Path,
    *,
    frontier: Plans | None = None,
    title: str = "",
    on_step: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Write an HTML page that explains a plan: memory over the step, kept values, recomputed operators.

    The page is a single file. It loads no other file and needs no server.

    Args:
        plan: the plan.
        path: the file to write, which ends with ``.html``.
        frontier: a frontier of the same graph and cost model, whose plans a slider selects; None: no slider.
        title: title of the page; empty: the name of the graph.
        on_step: function that is called with a line of text before each plan for the slider is made; None: no calls.

    Returns:
        The data of the page, which the page also contains as JSON: the fields of the plan, the frontier, and the
        fields of each plan of the slider.

    Raises:
        PlanError: Bokeh is not installed, the plan was read from a file, or the page cannot be
            written.
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
    page = Page(
        title=title or plan.graph,
        lead=f"Cost model {plan.cost}; decided by {plan.solver}.",
        stops=[_stop(p, p is plan, frontier) for p in plans],
        start=plans.index(plan),
        curve=None if frontier is None else _curve(frontier, plans),
        figures=figures,
    )
    write_file(path, page_of(page), "page", PlanError)
    return figures


def _along(frontier: Plans, plan: Plan, on_step: Callable[[str], None] | None) -> list[Plan]:
    """Return plans at some points of a frontier together with the given plan, fewest bytes first.

    A plan of the frontier is left out if it saves, recomputes and offloads the same values as the given plan.

    Args:
        frontier: the frontier.
        plan: the plan that the page is about.
        on_step: function that is called with a line of text before each plan is made; None: no calls.
    """
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
    """Return a key that is equal for plans that save, recompute and offload the same values."""
    return plan.saved, plan.recomputed, plan.offloads


def _added(plan: Plan) -> int:
    """Return the cost that a plan adds to the step: recomputation and exposed transfer time."""
    return plan.recompute_cost + plan.before_after.exposed_time


def _knee(frontier: Plans, plans: Sequence[Plan]) -> int:
    """Return the position in ``plans`` of the plan nearest to a frontier's knee, by bytes and then by cost."""
    knee = frontier.knee()
    nbytes, cost = frontier.bytes_of(knee), knee.recompute_cost
    return min(
        range(len(plans)),
        key=lambda k: (abs(frontier.bytes_of(plans[k]) - nbytes), abs(_added(plans[k]) - cost)),
    )


def _curve(frontier: Plans, plans: Sequence[Plan]) -> Curve:
    """Return a frontier as the curve that a page draws, with a text for each point."""
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
    # A bound whose vertices all have fewer bytes than every point is not drawn: it may be outside of the picture.
    shown = frontier.bound if any(nbytes >= least for nbytes, _ in frontier.bound) else ()
    return Curve(
        points=points,
        bound=shown,
        by=frontier.by,
        unit=frontier.unit,
        knee=_knee(frontier, plans),
    )


def _stop(plan: Plan, asked: bool, frontier: Plans | None) -> Stop:
    """Return a plan as a stop of the page's slider.

    Args:
        plan: the plan.
        asked: whether the page is about this plan. False: the plan is another plan of the frontier.
        frontier: the frontier whose plans the slider selects; None if the page has no slider.
    """
    return Stop(
        label=f"Plan at budget {plan.asked.label}"
        + (", as asked for" if asked and frontier else ""),
        plan=plan,
        view=plan.view,
        point=(frontier.bytes_of(plan) if frontier else plan.saved_bytes, _added(plan)),
    )
