"""The command ``remat frontier``: the best plan at every budget, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import (
    PLANNING,
    Captured,
    Step,
    list_option,
    main,
    takes_request,
    takes_step,
)
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.planning.frontier import Frontier, FrontierPoint
    from remat.planning.request import PlanRequest

#: Largest number of rows of the tables of all solvers together.
ROWS = 20


@main.command()
@takes_step
@takes_request(*PLANNING)
@list_option(
    "solvers",
    "comma-separated solvers; the command shows a frontier for each",
    params.SOLVER,
    default="auto",
)
@click.option(
    "--by",
    type=click.Choice(["saved", "peak", "bytes"]),
    default="saved",
    show_default=True,
    help="bytes that are traded against cost: the saved bytes (bytes is an alias), or the peak of the step",
)
@click.option(
    "--plot",
    type=params.PICTURE_FILE,
    help="draw the frontiers to this file, .svg or .png",
)
def frontier(
    step: Step,
    solvers: tuple[str, ...],
    by: str,
    request: PlanRequest,
    plot: Path | None,
) -> None:
    """Show the best plan of MODEL at every budget (the frontier), and the frontier's knee.

    The knee is the point beyond which more memory lowers the cost only a little. The column share
    is the ratio of the saved bytes to the bytes that the runtime-optimal partition saves. With --by
    peak the command takes only seconds, because it calls a solver only for budget 1 and a few
    budgets near the least peak. With --offload the command shows two frontiers by peak: one with
    offloading, and one without.
    """
    from remat.planning.frontier import Frontier
    from remat.planning.planner import Planner

    if request.offload is not None and by != "peak":
        raise click.UsageError("'--offload' goes together with '--by peak' only")
    plain = dataclasses.replace(request, offload=None)
    requests = [plain.by(solver) for solver in dict.fromkeys(solvers)]
    if request.offload is not None:
        # The frontiers without offloading follow for comparison.
        requests = [dataclasses.replace(requests[0], offload=request.offload), *requests]
    with Progress() as progress:
        captured = step.capture(progress)
        frontiers: list[Frontier] = []
        reasons: dict[str, str] = {}
        for each in requests:
            link = each.offload
            name = each.solver.name + ("" if link is None else f", offload {link}")
            progress.stage(f"planning at all budgets with {name}")
            try:
                planner = Planner.of(captured.joint, each, on_progress=progress.detail)
                frontiers.append(Frontier.of(planner, by))
            except RematError as error:
                if len(requests) == 1:
                    raise
                reasons[name] = params.one_line(error)
        if plot is not None and frontiers:
            progress.stage("drawing")
            frontiers[0].plot(plot, others=frontiers[1:])
    data = {
        "graph": captured.joint.name,
        "frontiers": [
            json.loads(each.to_json()) | {"knee": dataclasses.asdict(each.knee())}
            for each in frontiers
        ],
        "failed": reasons,
    }
    if not as_json(data):
        if frontiers:
            _show(captured, frontiers, str(request.cost))
        for name, reason in reasons.items():
            click.echo(f"{name}: no frontier: {reason}")
        if frontiers and plot is not None:
            click.echo(f"drawn: {plot}")
    if not frontiers:
        raise RematError("no solver found a frontier; the reasons stand above")


def _show(captured: Captured, frontiers: list[Frontier], cost: str) -> None:
    from remat.cli import tables
    from remat.units import counted, format_bytes

    first = frontiers[0]
    click.echo(f"{captured.title()}; cost model {tables.cost_text(first.cost, cost)}")
    if first.by == "peak":
        click.echo(f"every schedule has a peak of at least {format_bytes(first.bound[0][0])}")
    else:
        click.echo(
            f"{format_bytes(first.least_bytes)} is the least that can be saved; the runtime-optimal "
            f"partition saves {format_bytes(first.full_bytes)}"
        )
    for frontier in frontiers:
        points, shown = frontier.points, frontier.thinned(ROWS // len(frontiers))
        note = f", {len(shown)} of them here" if len(shown) < len(points) else ""
        click.echo(f"\n{frontier.label}: {counted(len(points), 'point')}{note}")
        tables.show_rows([_row(frontier, point) for point in shown], unit=frontier.unit)


def _row(frontier: Frontier, point: FrontierPoint) -> dict[str, Any]:
    """Return one row of a frontier's table as a dict from heading to value; an arrow marks the knee."""
    figures = dataclasses.asdict(point)
    if frontier.by == "peak":
        figures = dict(reversed(figures.items()))
    elif frontier.full_bytes:
        figures = {"share": f"{point.saved_bytes / frontier.full_bytes:.3f}", **figures}
    return {**figures, "": "← knee" if point == frontier.knee() else ""}
