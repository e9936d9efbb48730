"""The command ``remat sweep``: plan many models, budgets, solvers and cost models in one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import Step, json_option, list_option, main, plan_options, record_options
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.experiments.table import ExperimentRow


@dataclass(frozen=True, slots=True, repr=False)
class Named:
    """Callable that builds the model that the command line names as MODEL.

    Worker processes receive a `Named` instead of a built model.

    Attributes:
        spec: MODEL as typed.
    """

    spec: str

    def __repr__(self) -> str:
        return self.spec  # the table's column `of` has this text

    def __call__(self) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        """Build the model, and return it with its positional and keyword arguments."""
        from remat.cli.models import load

        try:
            example = load(self.spec)
        except click.UsageError as error:
            raise RematError(error.message) from None
        return example.model, example.args, example.kwargs


@main.command()
@click.argument(
    "models", nargs=-1, required=True, metavar="MODEL…", is_eager=True, callback=params.check_file
)
@list_option("budgets", "comma-separated budgets", default="0.2,0.5,0.8")
@list_option("solvers", "comma-separated solvers", params.SOLVER, default="auto")
@list_option("costs", "comma-separated cost models", default="auto")
@record_options(Step, "lower")
@plan_options("time_limit")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="number of processes that plan in parallel [default: plan in this process]",
)
@click.option(
    "-o",
    "--output",
    type=params.OutputFile(".jsonl", ".json", ".csv"),
    metavar="FILE",
    help="write the table to FILE, .jsonl, .json or .csv; rows of an earlier call are not planned again",
)
@json_option
def sweep(models: tuple[str, ...], jobs: int | None, output: Path | None, **options: Any) -> None:
    """Plan each MODEL at every budget, with every solver, under every cost model.

    Each plan is one row of a table. With --output, each row is stored as soon as it is planned.
    After a crash, the same command plans only the missing rows.
    """
    from remat.cli.models import check
    from remat.experiments.grid import sweep as plan_all
    from remat.units import counted

    for spec in models:  # a misspelt model is refused before hours of planning
        check(spec)
    # Rows that are requested twice are planned once.
    lists = (models, *(options[name] for name in ("budgets", "solvers", "costs")))
    total = math.prod(len(set(values)) for values in lists)
    missing = finished = 0
    with Progress() as progress:

        def on_start(rows: Mapping[str, int]) -> None:
            nonlocal missing
            missing = sum(rows.values())
            progress.stage(f"planning {counted(missing, 'row')}{_taken(total - missing, output)}")

        def on_row(row: ExperimentRow) -> None:
            nonlocal finished
            finished += 1
            progress.detail(
                f"{finished} of {missing}: {row.model} at {row.label} with {row.solver}"
            )

        table = plan_all(
            {spec: Named(spec) for spec in models},
            executor=jobs,
            output=output,
            on_start=on_start,
            on_row=on_row,
            **options,
        )
    failed, count = sum(row.reason is not None for row in table.rows), len(table.rows)
    if not as_json({"rows": [asdict(row) for row in table.rows]}):
        click.echo(str(table))
        if output is not None:
            click.echo(f"written to {output}{_taken(total - missing, output)}")
        if failed:
            click.echo(f"{failed} of {count} rows have no plan; the reasons stand above")
    if failed == count:
        raise RematError("no row has a plan; the reasons stand with the rows")


def _taken(rows: int, output: Path | None) -> str:
    """Return a text on rows that need no planning, as in ``"; 3 rows taken from sweep.jsonl"``; empty for 0 rows."""
    from remat.units import counted

    return f"; {counted(rows, 'row')} taken from {output}" if rows else ""
