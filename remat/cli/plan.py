"""The command ``remat plan``: plan one training step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from remat.cli import params
from remat.cli.commands import PLANNING, Step, main, takes_request, takes_step
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.files import write_file

if TYPE_CHECKING:
    from remat.cli.commands import Captured
    from remat.planning.plan import Plan
    from remat.planning.plan_set import PlanSet
    from remat.planning.request import PlanRequest

#: Exit code if the plan is within the budget by simulation, but not by the estimate for Inductor. The exit code
#: 3 is used by `repro`.
ABOVE_AS_COMPILED = 4


@main.command()
@takes_step
@takes_request("budget", "solver", "hooks", *PLANNING)
@click.option(
    "--save",
    type=params.OutputFile(),
    help="write the plan to this file, to be reused with options={'plan': FILE}",
)
@click.option(
    "--no-fullgraph",
    "fullgraph",
    is_flag=True,
    flag_value=False,
    default=True,
    help="plan all graphs of a model with graph breaks together, under one budget",
)
@click.option(
    "--run",
    is_flag=True,
    help="with --no-fullgraph: run forward once on real tensors, to take branches that depend on their values",
)
@click.option("--explain", is_flag=True, help="also print what is saved and what is recomputed")
@click.option(
    "--plot",
    type=params.PICTURE_FILE,
    help="draw the memory of the step without remat and under the plan to this file, .svg or .png",
)
def plan(
    step: Step,
    request: PlanRequest,
    save: Path | None,
    explain: bool,
    plot: Path | None,
    fullgraph: bool,
    run: bool,
) -> None:
    """Plan one training step of MODEL under a memory budget.

    The exit code is 4 if the plan's simulated peak is within the budget, but the peak estimated for Inductor's code is
    above.
    """
    from remat.planning.plan import Plan
    from remat.planning.planner import plan_graph
    from remat.planning.set_planner import plan_graphs

    if run and fullgraph:
        raise click.UsageError("'--run' goes together with '--no-fullgraph' only")
    if plot is not None and not fullgraph:
        raise click.UsageError(
            "'--plot' draws the step of one graph; leave '--no-fullgraph' out, or draw the plans from Python"
        )
    with Progress() as progress:
        captured = step.capture(progress, fullgraph=fullgraph, run=run)
        progress.stage("planning")
        planned: Plan | PlanSet = (
            plan_graph(captured.joint, request, on_progress=progress.detail)
            if len(captured.joints) == 1
            else plan_graphs(captured.joints, request)
        )
        if plot is not None and isinstance(planned, Plan):
            progress.stage("drawing")
            planned.plot(plot)
    if save is not None:
        write_file(save, planned.to_json(), "plan")
    fuses = step.lower == "inductor" and request.budget.on_peak
    estimated = planned.estimated_peak_bytes if fuses and isinstance(planned, Plan) else 0
    limit = request.budget.peak_bytes or estimated
    machine = as_json(planned.to_json())
    if estimated > limit:  # under --json, standard output contains only the plan
        click.echo(_above(estimated, limit), err=machine)
    if not machine:
        _show(captured, planned, request, explain, estimated)
        for label, path in (("drawn:", plot), ("plan written to", save)):
            if path is not None:
                click.echo(f"{label} {path}")
    click.get_current_context().exit(ABOVE_AS_COMPILED if estimated > limit else 0)


def _show(
    captured: Captured,
    planned: Plan | PlanSet,
    request: PlanRequest,
    explain: bool,
    estimated: int,
) -> None:
    """Print the plan of each graph and, if known, the peak that is expected after Inductor's fusion."""
    from remat.cli.tables import plan_table
    from remat.planning.plan import Plan
    from remat.report.tables import show
    from remat.units import format_bytes

    plans = [planned] if isinstance(planned, Plan) else planned
    for joint, each in zip(captured.joints, plans, strict=True):
        if explain:  # the explanation contains the figures of the table
            click.echo(f"{captured.title(joint)}\n{each.explain()}")
        else:
            show(plan_table(each, captured.title(joint), str(request.cost)))
    if not isinstance(planned, Plan):
        click.echo(planned.explain().partition("\n")[0])
    elif estimated:
        click.echo(
            f"as compiled    {format_bytes(estimated)} is expected once Inductor has fused this plan; "
            'torch.compile(backend="remat") plans by such peaks, this command by those of the graph as it is'
        )


def _above(estimated: int, limit: int) -> str:
    """Return the output's first line if a plan's simulated peak is within the budget, but its estimated peak is not."""
    from remat.units import format_apart

    allowed, peak = format_apart(limit, estimated)
    return (
        f"above budget   a peak of {peak} ({estimated} bytes) is estimated under Inductor; expected at most {allowed} "
        f"({limit} bytes), which holds by simulation without fusion. Try other budgets here, or train with "
        'torch.compile(backend="remat"), which plans by estimated peaks'
    )
