"""The command ``remat sweep``: plan many models, budgets, solvers and cost models in one table."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import (
    json_option,
    list_option,
    lower_option,
    main,
    plan_options,
)
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.experiments.table import ExperimentRow


@dataclass(frozen=True, slots=True, repr=False)
class Named:
    """Callable that builds MODEL. Worker processes receive a `Named` instead of a built model.

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
            with contextlib.redirect_stdout(sys.stderr):
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
@lower_option
@plan_options("time_limit")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="number of processes that plan in parallel [default: plan in this process]",
)
@click.option(
    "-o",
    "--output",
    type=params.Checked("path", "remat.experiments.table:checked_path"),
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
    # The model of each table row that must still be planned, in the order of planning.
    missing: list[str] = []
    planned = 0
    with Progress() as progress, _resumable(output):

        def on_start(rows: Mapping[str, int]) -> None:
            missing.extend(model for model, count in rows.items() for _ in range(count))
            begin_stage()

        def begin_stage() -> None:
            """Show that the planning of one model or, with ``--jobs``, of all models begins."""
            taken = _taken(total - len(missing), output)
            if jobs is not None or not missing:
                progress.stage(f"planning {counted(len(missing), 'row')}{taken}")
                return
            model, names = missing[planned], list(dict.fromkeys(missing))
            place = f"{names.index(model) + 1} of {len(names)} models"
            rows = counted(missing.count(model), "row")
            progress.stage(f"planning {rows} of {model} ({place}){taken}")

        def on_row(row: ExperimentRow) -> None:
            nonlocal planned
            planned += 1
            if jobs is None and planned < len(missing) and missing[planned] != row.model:
                begin_stage()
            progress.detail(
                f"{planned} of {len(missing)}: {row.model} at {row.label} with {row.solver}"
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
            click.echo(f"written to {output}{_taken(total - planned, output)}")
        if failed:
            click.echo(f"{failed} of {count} rows have no plan; the reasons stand in the table")
    if failed == count:
        raise RematError("no row has a plan; the reasons stand with the rows")


def _taken(rows: int, output: Path | None) -> str:
    """Return a text on rows that need no planning, as in ``"; 3 rows taken from sweep.jsonl"``; empty for 0 rows."""
    from remat.units import counted

    return f"; {counted(rows, 'row')} taken from {output}" if rows else ""


@contextlib.contextmanager
def _resumable(output: Path | None) -> Iterator[None]:
    """If Ctrl-C interrupts the ``with`` block, print the command that continues a sweep with an output file."""
    try:
        yield
    except KeyboardInterrupt:
        if output is not None:
            from remat.experiments.journal import journal_of

            again = shlex.join(["remat", *sys.argv[1:]])
            click.echo(
                f"finished rows stand in {journal_of(output)}; go on with: {again}", err=True
            )
        raise
