"""The command ``remat explain``: show a plan as text or HTML, or export it to other tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import PLANNING, Step, main, takes_request, takes_step
from remat.cli.output import as_json
from remat.cli.progress import Progress

if TYPE_CHECKING:
    from remat.planning.request import PlanRequest


@main.command()
@takes_step
@takes_request("budget", "solver", *PLANNING)
@click.option(
    "--html", type=params.OutputFile(".html", ".htm"), help="write an HTML page to explore the plan"
)
@click.option(
    "--by",
    type=click.Choice(["saved", "peak", "none", "bytes"]),
    help="the frontier that the slider of the page moves over; none: no slider, less work "
    "[default: saved, or peak for a budget on the peak, and with --offload]",
)
@click.option(
    "--export",
    "exports",
    type=params.OutputFile(".pickle", ".json", ".csv"),
    multiple=True,
    help="write the step for another tool: .pickle (PyTorch's memory viewer), .json (Chrome, Perfetto), .nodes.json "
    "(Model Explorer), .csv; may be given several times",
)
def explain(
    step: Step,
    request: PlanRequest,
    html: Path | None,
    by: str | None,
    exports: tuple[Path, ...],
) -> None:
    """Explain one plan of MODEL: as text, as an HTML page, or as a file for another tool.

    Without --html and --export, the command prints the same text as `remat plan --explain`.
    """
    from remat.planning.frontier import Frontier
    from remat.planning.planner import Planner, warn_of_peak
    from remat.planning.reading.view import figures_of
    from remat.report.page import require_bokeh

    by = by or ("peak" if request.offload is not None or request.budget.on_peak else "saved")
    if html is not None and by not in ("peak", "none") and request.offload is not None:
        raise click.UsageError("'--offload' goes together with '--by peak' or '--by none' only")
    files = (*([html] if html else []), *exports)
    resolved = [path.resolve() for path in files]
    if repeated := [path for path in files if resolved.count(path.resolve()) > 1]:
        raise click.UsageError(
            f"'{repeated[0]}' is to be written twice; give each file a name of its own"
        )
    if html is not None:
        require_bokeh()
    with Progress() as progress:
        captured = step.capture(progress)
        progress.stage("planning")
        is_only = html is None or by == "none"
        planner = Planner.of(
            captured.joint, request, on_progress=progress.detail, at_budget=is_only
        )
        plan = planner.finish(planner.decide(request.budget), request.budget)
        warn_of_peak(plan)
        figures: Mapping[str, Any] = {"plan": figures_of(plan), "frontier": None, "plans": []}
        title = captured.example.title
        if html is not None and is_only:
            progress.stage("writing the page")
            figures = plan.explore(html, title=title)
        elif html is not None:
            progress.stage(f"planning at all budgets, by {by}")
            frontier = Frontier.of(planner, by)
            progress.stage("writing the page")
            figures = frontier.explore(html, plan, title=title, on_progress=progress.detail)
        for path in exports:
            progress.stage(f"writing {path}")
            plan.export(path)
    if as_json(figures):
        return
    if not files:
        click.echo(captured.title())
        click.echo(plan.explain())
    for path in files:
        click.echo(f"written: {path}")
