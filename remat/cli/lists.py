"""The commands that list what there is to choose from: solvers, passes and cost models."""

from __future__ import annotations

import json
from typing import Any

import click

from remat.cli.commands import echo_json, json_option, main


@main.command()
@json_option
def solvers(as_json: bool) -> None:
    """List the solvers, and why those that cannot run here cannot."""
    from remat.cli import listings
    from remat.plugins.registry import registry

    rows = listings.solver_rows()
    _list(as_json, {"solvers": rows}, refused=[str(problem) for problem in registry().problems])


@main.command()
@click.option("--pipeline", is_flag=True, help="print the pipeline that plans come about by")
@json_option
def passes(pipeline: bool, as_json: bool) -> None:
    """List the passes and analyses, with the options that a pipeline can give them."""
    from remat.cli import listings

    if pipeline:
        from remat.api import default_pipeline

        text = str(default_pipeline())
        click.echo(json.dumps({"pipeline": text}) if as_json else text)
        return
    _list(as_json, {"passes": listings.pass_rows(), "analyses": listings.analysis_rows()})


@main.command()
@json_option
def costs(as_json: bool) -> None:
    """List the cost models, and the devices that they know."""
    from remat.cli import listings

    _list(as_json, {"costs": listings.cost_rows()})


def _list(as_json: bool, rows: dict[str, Any], **more: Any) -> None:
    """Prints lists, each as a table of its own, or all as JSON with what else there is to know."""
    from remat.cli import tables

    if as_json:
        echo_json(rows | more)
        return
    for k, (what, of) in enumerate(rows.items()):
        if k:
            click.echo()
        tables.show(tables.listing(what, of))
