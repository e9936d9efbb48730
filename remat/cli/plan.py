"""The command ``remat plan``: plan one training step."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import (
    budget_option,
    capture_graphs,
    chunk_option,
    echo_json,
    main,
    model_options,
    offload_option,
    policy_option,
    solver_option,
    takes_request,
    title_of,
)
from remat.cli.progress import Progress
from remat.errors import CaptureError

if TYPE_CHECKING:
    from remat.planning.plans import PlanSet
    from remat.planning.request import PlanRequest


@main.command()
@model_options
@budget_option
@solver_option
@click.option(
    "--save",
    type=params.OutputFile(),
    help="write the plan to this file, to be reused with options={'plan': FILE}",
)
@click.option(
    "--hooks",
    metavar="PAIR",
    help="pair of saved-tensor hooks that what is saved passes through: bf16, float8, int8, cpu-offload",
)
@offload_option
@policy_option
@chunk_option
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
    help="with --no-fullgraph: run forward once on real tensors, to take branches that depend on numbers",
)
@click.option("--explain", is_flag=True, help="also print what is saved and what is recomputed")
@click.option(
    "--plot",
    type=params.PICTURE_FILE,
    help="draw the memory of the step without remat and under the plan to this file, .svg or .png",
)
@click.option(
    "--graph-breaks",
    "only_breaks",
    is_flag=True,
    help="plan nothing: list where the model breaks into graphs, each with the reason and the line",
)
@takes_request
def plan(
    model: str,
    overrides: tuple[str, ...],
    request: PlanRequest,
    save: Path | None,
    explain: bool,
    plot: Path | None,
    only_breaks: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan one training step of MODEL under a memory budget."""
    from remat.cli import tables
    from remat.planning.plan import Plan
    from remat.planning.plan_set import plan_graphs
    from remat.planning.planner import plan_graph
    from remat.units import format_bytes

    if only_breaks:
        _tell_breaks(model, overrides, as_json=as_json, **options)
        return
    if options["run"] and options["fullgraph"]:
        raise click.UsageError(
            "'--run' goes together with '--no-fullgraph' or '--graph-breaks' only"
        )
    if plot is not None and not options["fullgraph"]:
        raise click.UsageError(
            "'--plot' draws the step of one graph; leave '--no-fullgraph' out, or draw the plans from Python"
        )
    with Progress() as progress:
        example, joints, captured = capture_graphs(progress, model, overrides, **options)
        progress.step("planning")
        made: Plan | PlanSet = (
            plan_graph(joints[0], request, on_step=progress.detail)
            if len(joints) == 1
            else plan_graphs(joints, request)
        )
        if plot is not None and isinstance(made, Plan):
            progress.step("drawing")
            made.plot(plot)
    if save is not None:
        params.write(save, made.to_json(), "plan")
    if as_json:
        click.echo(made.to_json(), nl=False)
        return
    for joint, one in zip(joints, [made] if isinstance(made, Plan) else made, strict=True):
        tables.show(tables.plan_table(one, title_of(example, joint, captured), str(request.cost)))
    if not isinstance(made, Plan):
        click.echo(made.explain().partition("\n")[0])
    elif request.budget.on_peak and options["lower"] == "inductor":
        click.echo(
            f"as compiled    {format_bytes(made.predicted_peak_bytes)} is expected once Inductor has fused this plan; "
            'torch.compile(backend="remat") plans by such peaks, this command by those of the graph as it is'
        )
    if explain:
        click.echo("\n" + made.explain())
    for what, path in (("drawn:", plot), ("plan written to", save)):
        if path is not None:
            click.echo(f"{what} {path}")


def _tell_breaks(
    model: str,
    overrides: tuple[str, ...],
    *,
    as_json: bool,
    run: bool,
    device: str | None,
    lower: str,
    fullgraph: bool,
    **options: Any,
) -> None:
    """Print where MODEL breaks into graphs, for ``--graph-breaks``.

    Raises:
        CaptureError: Dynamo cannot trace MODEL. The advice names options of the command instead of
            arguments.
    """
    from remat.cli.models import load
    from remat.graph.graph_breaks import graph_breaks

    with Progress() as progress, contextlib.redirect_stdout(sys.stderr):
        progress.step(f"building {model}")
        example = load(model, overrides, **options)
        progress.step("looking for graph breaks")
        try:
            found = graph_breaks(
                example.model, example.args, example.kwargs, device=device, run=run
            )
        except CaptureError as error:
            if "run=True" not in error.remedies:
                raise
            raise CaptureError(
                f"{error.reason}. Such branches are found by running forward once: remat plan {model} "
                "--graph-breaks --run, with a MODEL of real tensors"
            ) from error
    if as_json:
        echo_json(dataclasses.asdict(found))
        return
    click.echo(f"{example.title}: {found.summary}")
    for k, one in enumerate(found.breaks, 1):
        click.echo(f"{k:>3}  {one.source or 'unknown line'}\n     {one.reason}")
        if one.hint:
            click.echo(f"     {one.hint}")
