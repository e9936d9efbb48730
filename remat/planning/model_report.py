"""The report of a model: its frontier, a plan for each budget, and solvers side by side, on one page."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from remat.errors import PlanError, ProblemError
from remat.files import write_whole
from remat.graph.costs.measure import describe_device, this_device
from remat.graph.joint import JointGraph
from remat.planning.comparison import Comparison, compare
from remat.planning.frontier import Frontier
from remat.planning.plan import Plan
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.report.explorer import curve_of, figures_of, stop_of
from remat.report.page import Page, Section, require_bokeh, write_page
from remat.units import format_bytes, format_change, format_cost, format_share
from remat.version import __version__


def figures_path(path: str | Path) -> Path:
    """Where the figures of a report go: beside its page, with the suffix ``.json``.

    Raises:
        ProblemError: the path does not end with ``.html``.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise ProblemError(
            f"the report cannot be written to '{path}': its suffix is '{target.suffix}'; expected .html"
        )
    return target.with_suffix(".json")


def environment(joint: JointGraph) -> dict[str, str]:
    """Versions and hardware that the figures of a report come from."""
    return {
        "remat": __version__,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "OR-Tools": version("ortools"),
        "SciPy": version("scipy"),
        "system": platform.platform(),
        "this machine": describe_device(this_device()),
        "lowering": joint.lower,
    }


def write_report(
    joint: JointGraph,
    requests: Sequence[PlanRequest],
    path: str | Path,
    *,
    solvers: Sequence[str],
    title: str = "",
    on_step: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Writes one page over a model: its frontier, a plan for each budget, and solvers side by side.

    Beside it, with the suffix ``.json``, all figures of the page.

    Args:
        joint: the captured step.
        requests: one for each budget; the first names the solver of the frontier.
        path: where to; ``.html``.
        solvers: who is compared.
        title: what it is about.
        on_step: called with a line of text before each part.

    Returns:
        The figures.

    Raises:
        PlanError: Bokeh is not installed, or a file cannot be written.
        ProblemError: the path does not end with ``.html``, or there is no budget or no solver.
    """
    require_bokeh()
    target, beside = Path(path), figures_path(path)
    if not requests or not solvers:
        raise ProblemError(
            f"the report has {len(requests)} budgets and {len(solvers)} solvers; expected one or more of both"
        )

    def tell(text: str) -> None:
        if on_step is not None:
            on_step(text)

    tell("frontier")
    planner = Planner.of(joint, requests[0])
    frontier = Frontier.of(planner)
    plans = []
    for request in requests:
        tell(f"plan at {request.budget.label}")
        plans.append(planner.finish(planner.decide(request.budget), request.budget))
    plans.sort(key=lambda p: (p.saved_bytes, -p.recompute_cost))
    tell(f"comparing {len(solvers)} solvers")
    table = compare(
        joint,
        solvers,
        [r.budget for r in requests],
        requests[0].cost,
        requests[0].time_limit,
        reread_inputs=requests[0].reread_inputs,
    )
    figures = {
        "environment": environment(joint),
        "plans": [figures_of(p) for p in plans],
        "frontier": json.loads(frontier.to_json()) | {"knee": asdict(frontier.knee())},
        "comparison": json.loads(table.to_json()),
    }
    start = next(k for k, p in enumerate(plans) if str(p.asked) == str(requests[0].budget))
    page = Page(
        title=f"Report: {title or joint.name}",
        lead=f"Cost model {table.cost}; plans at {len(plans)} budgets by {requests[0].solver.name}.",
        stops=[stop_of(p, False, frontier) for p in plans],
        start=start,
        slider=("Plan at each budget of the report", "less memory", "less recomputing"),
        no_slider="There is no slider: the report has one budget.",
        curve=curve_of(frontier),
        without=plans[start].view.without,
        sections=_sections(plans, table, figures["environment"]),
        figures=figures,
    )
    write_page(page, target)
    try:
        write_whole(beside, json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise PlanError(f"figures '{beside}' cannot be written: {error.strerror}") from error
    return figures


def _sections(
    plans: Iterable[Plan], table: Comparison, environment: Mapping[str, str]
) -> list[Section]:
    budgets = Section(
        title="Budgets",
        text="One plan for each budget; the slider above moves over them. Without remat is budget 1.",
        columns=("budget", "kept", "recomputed", "peak", "step"),
        rows=[
            (
                p.asked.label,
                format_bytes(p.saved_bytes),
                format_cost(p.recompute_cost, p.unit),
                format_bytes(p.peak_bytes),
                p.before_after.step_text or "not known",
            )
            for p in plans
        ],
    )
    solvers = Section(
        title="Solvers side by side",
        text="Every solver at every budget, by one evaluator. Bold is the least cost at a budget. The gap is the share "
        "of the cost that may be more than any plan needs; step is the modelled time beside that without remat.",
        columns=("budget", "solver", "kept", "recomputed", "gap", "peak", "step", "solved in"),
        rows=[
            (
                r.label,
                r.solver,
                format_bytes(r.saved_bytes),
                format_cost(r.recompute_cost, r.unit or ""),
                format_share(r.gap),
                format_bytes(r.peak_bytes or 0),
                format_change(r.more),
                f"{r.solve_s or 0:.2f} s",
            )
            if r.saved_bytes is not None and r.recompute_cost is not None
            else (r.label, r.solver, f"no plan: {' '.join((r.reason or '').split())}", *[""] * 5)
            for r in table.rows
        ],
        best=frozenset(k for k, r in enumerate(table.rows) if r.best),
    )
    made_with = Section(
        title="Versions and hardware",
        text="What these figures were made with. Times of operators are modelled for the device that the cost model "
        "names; solvers ran on this machine.",
        columns=("what", "version"),
        rows=list(environment.items()),
    )
    return [budgets, solvers, made_with]
