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

from remat.errors import BudgetError, ProblemError
from remat.files import read_as
from remat.graph.costs.measure import describe_device, this_device
from remat.graph.joint import JointGraph
from remat.planning.experiment_table import Comparison
from remat.planning.experiments import compare
from remat.planning.frontier import Frontier
from remat.planning.plan import Plan
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.report.explorer import curve_of, figures_of, stop_of
from remat.report.page import Page, Section, require_bokeh, write_page
from remat.units import format_bytes, format_change, format_cost, format_share
from remat.version import __version__

#: Bytes of a file of figures beyond which it is none of ours.
_MAX_FIGURES = 2**28


def figures_path(path: str | Path) -> Path:
    """Where the figures of a report go: beside its page, with the suffix ``.json``.

    Raises:
        ProblemError: the path does not end with ``.html``, or what lies there are no figures of a report.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise ProblemError(
            f"the report cannot be written to '{path}': its suffix is '{target.suffix}'; expected .html"
        )
    beside = target.with_suffix(".json")
    if beside.exists():
        try:
            told = read_as("figures", beside, json.loads, _MAX_FIGURES)
        except ProblemError:
            told = None
        if not isinstance(told, dict) or "environment" not in told:
            raise ProblemError(
                f"the figures of the report would replace '{beside}', which are no figures of a report; give the "
                "page another name, or move that file"
            )
    return beside


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
        ProblemError: the path does not end with ``.html``, there is no budget or no solver, or a file that
            is none of ours lies where the figures go.
        BudgetError: no budget has a plan.
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
    budgets = list({str(r.budget): r.budget for r in requests}.values())
    plans: list[Plan] = []
    refused: dict[str, BudgetError] = {}
    for budget in budgets:
        tell(f"plan at {budget.label}")
        try:
            plans.append(planner.finish(planner.decide(budget), budget))
        except BudgetError as error:
            refused[budget.label] = error
    if not plans:
        raise next(iter(refused.values()))
    plans.sort(key=lambda p: (p.saved_bytes, -p.recompute_cost))
    tell(f"comparing {len(solvers)} solvers")
    table = compare(
        joint,
        solvers,
        budgets,
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
    asked = [str(p.asked) for p in plans]
    start = asked.index(next(str(b) for b in budgets if str(b) in asked))
    page = Page(
        title=f"Report: {title or joint.name}",
        lead=f"Cost model {table.cost}; plans at {len(plans)} budgets by {requests[0].solver.name}.",
        stops=[stop_of(p, False, frontier) for p in plans],
        start=start,
        slider=("Plan at each budget of the report", "less memory", "less recomputing"),
        no_slider="There is no slider: the report has one budget.",
        curve=curve_of(frontier),
        without=plans[start].view.without,
        sections=_sections(plans, refused, table, figures["environment"]),
        figures=figures,
    )
    write_page(page, target, {beside: json.dumps(figures, indent=2) + "\n"})
    return figures


def _sections(
    plans: Iterable[Plan],
    refused: Mapping[str, BudgetError],
    table: Comparison,
    environment: Mapping[str, str],
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
        ]
        + [(label, _no_plan(str(error)), *[""] * 3) for label, error in refused.items()],
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
            else (r.label, r.solver, _no_plan(r.reason), *[""] * 5)
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


def _no_plan(reason: str | None) -> str:
    return f"no plan: {' '.join((reason or '').split())}"
