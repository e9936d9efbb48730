"""The command ``remat sac``: plan activation checkpointing for eager code."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from remat.cli import params
from remat.cli.commands import (
    Step,
    json_option,
    list_option,
    main,
    model_arguments,
    plan_options,
    record_options,
)
from remat.cli.models import load, users_code
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import BudgetError, CaptureError, RematError
from remat.files import write_file

#: Values of ``--mode``: the first takes runtimes from a cost model, the second measures each operator.
MODES = ("operator-level-cost-model", "operator-level-benchmark")


@main.command()
@model_arguments
@click.option(
    "--memory",
    type=params.MEMORY,
    required=True,
    help="limit on the peak of a step: 12GiB, bytes, or a ratio of the peak without checkpointing such as 0.5",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default=MODES[0],
    show_default=True,
    help="source of the runtimes: a cost model, or a measurement of each operator",
)
@click.option("--cost", type=params.COST_MODEL, help="cost model, instead of the mode's own")
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="number of ranks over which FSDP shards parameters and gradients",
)
@list_option(
    "units",
    "comma-separated modules that may be checkpointed: names or patterns such as model.layers.*",
)
@list_option(
    "fsdp-units",
    "comma-separated modules that FSDP gathers as one unit: names or patterns",
    default=(),
)
@plan_options("time_limit")
@record_options(Step, "batch", "seq")
@click.option(
    "--run", "run_it", is_flag=True, help="run steps without and with the plan, and measure both"
)
@click.option(
    "-o",
    "--output",
    type=params.OutputFile(),
    help="write the plan to this file, as JSON",
)
@json_option
def sac(
    model: str,
    overrides: tuple[str, ...],
    memory: str,
    batch: int | None,
    seq: int | None,
    run_it: bool,
    output: Path | None,
    mode: str,
    cost: Any,
    **options: Any,
) -> None:
    """Choose the modules of MODEL to checkpoint, and the activations that each checkpointed module stores.

    The plan is for eager code. remat.sac.apply(model, plan) applies it with torch.utils.checkpoint.
    """
    from remat.cli.tables import show_figures
    from remat.sac.api.checkpointing import check
    from remat.sac.estimation.modules import estimate
    from remat.sac.solve.milp import plan as plan_for

    measured: dict[str, Any] | None = None
    failure: RematError | None = None
    with Progress() as progress:
        progress.stage("building the model")
        device = "cpu" if run_it else "meta"  # a real step needs real weights
        example = load(model, overrides, batch=batch, seq=seq, device=device)
        call = example.model, example.args, example.kwargs
        progress.stage("estimating")
        with users_code(model):
            tree = estimate(*call, mode=mode, cost=cost)
        progress.stage("choosing")
        try:
            plan = plan_for(tree, memory=memory, **options)
        except BudgetError as error:
            raise BudgetError(f"{example.title}: {error}") from None
        if output is not None:
            write_file(output, plan.to_json(), "plan")
        if run_it:
            progress.stage("running")
            try:
                with users_code(model):
                    measured = asdict(check(example.model, plan, example.args, example.kwargs))
            except RematError as error:
                failure = CaptureError(f"the plan stands above, but no step could be run: {error}")
    if not as_json({"plan": json.loads(plan.to_json()), "measured": measured}):
        click.echo(f"{example.title}\n\n{plan.explain()}")
        if measured is not None:
            estimated = {
                "plain_peak_bytes": plan.plain_peak_bytes,
                "peak_bytes": plan.peak_bytes,
                "plain_ms": plan.step_ms,
                "ms": plan.step_ms + plan.recompute_ms,
            }
            click.echo()
            show_figures([estimated, measured], heads=("", "estimated", "measured"))
        if cost is None and mode == MODES[0] and failure is None:
            click.echo(
                "times are those of an H100; --cost roofline:epyc estimates for a CPU", err=True
            )
        if output is not None:
            click.echo(f"plan: {output}")
            click.echo(f"apply: remat.sac.apply(model, remat.sac.SACPlan.load({str(output)!r}))")
    if failure is not None:
        raise failure
