"""The command ``remat sweep``: many models, budgets, solvers and cost models in one table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from remat.cli import params
from remat.cli.commands import echo_json, json_option, main
from remat.cli.progress import Progress
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.planning.sweep_table import SweepRow

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Named:
    """A model by its MODEL text, built where it is called: what a worker is sent."""

    spec: str

    def __call__(self) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        from remat.cli.models import load

        try:
            with contextlib.redirect_stdout(sys.stderr):
                example = load(self.spec)
        except click.UsageError as error:
            raise RematError(error.message) from None
        return example.model, example.args, example.kwargs


def _list(default: str, name: str, told: str) -> Callable[[Command], Command]:
    return click.option(
        f"--{name}",
        type=params.ListOf(click.STRING),
        metavar=f"{name[:-1].upper()},…",
        default=default,
        show_default=True,
        help=told,
    )


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@_list("0.2,0.5,0.8", "budgets", "budgets, with commas")
@_list("auto", "solvers", "who decides, with commas")
@_list("auto", "costs", "cost models, with commas")
@click.option(
    "--lower",
    type=click.Choice(["inductor", "eager"]),
    default="inductor",
    show_default=True,
    help="the lowering that models are captured for",
)
@click.option("--time-limit", type=params.SECONDS, help="seconds for each solver on each problem")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="processes that plan at the same time; this one where it is left out",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="the table, .json, .csv or .parquet; what it, or FILE.partial, has already is not planned again",
)
@json_option
def sweep(
    models: tuple[str, ...],
    budgets: tuple[str, ...],
    solvers: tuple[str, ...],
    costs: tuple[str, ...],
    lower: str,
    time_limit: float | None,
    jobs: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plan each MODEL at every budget, with every solver, under every cost model.

    Each row is written as soon as it is known: after a crash the same command goes on where it was.
    """
    from remat.planning import sweep as api

    total = len(set(models)) * len(set(budgets)) * len(set(solvers)) * len(set(costs))
    known = 0
    with Progress() as progress:
        progress.step(f"planning {total} rows")

        def on_row(row: SweepRow) -> None:
            nonlocal known
            known += 1
            progress.detail(
                f"{known} of {total}: {row.model} at {row.row.label} with {row.row.solver}"
            )

        found = api.sweep(
            {spec: Named(spec) for spec in models},
            budgets=budgets,
            solvers=solvers,
            costs=costs,
            time_limit=time_limit,
            lower=lower,
            executor=jobs,
            output=output,
            on_row=on_row,
        )
    if as_json:
        echo_json({"rows": [row.as_dict() for row in found.rows]})
    else:
        click.echo(str(found))
        if output is not None:
            click.echo(f"written to {output}")
