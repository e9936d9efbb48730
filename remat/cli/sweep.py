"""The command ``remat sweep``: plan many models, budgets, solvers and cost models in one table."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import (
    echo_json,
    json_option,
    list_option,
    lower_option,
    main,
    time_limit_option,
)
from remat.cli.errors import fail
from remat.cli.progress import Progress
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.planning.experiment_table import ExperimentRow


@dataclass(frozen=True, slots=True, repr=False)
class Named:
    """Callable that builds MODEL. Worker processes receive this object instead of a built model.

    Attributes:
        spec: MODEL as typed.
    """

    spec: str

    def __repr__(self) -> str:
        return self.spec  # the column `of` of the table has it

    def __call__(self) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        """Build the model, and return it with its positional and keyword arguments.

        Raises:
            RematError: MODEL does not exist, or the user's code raised.
        """
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
@time_limit_option
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="number of processes that plan in parallel [default: plan in this process]",
)
@click.option(
    "-o",
    "--output",
    type=params.Checked("path", "remat.planning.experiment_table:checked_path"),
    metavar="FILE",
    help="write the table to FILE, .json, .csv or .parquet; rows that FILE or FILE.partial already has are not "
    "planned again",
)
@json_option
def sweep(
    models: tuple[str, ...], jobs: int | None, output: Path | None, as_json: bool, **options: Any
) -> None:
    """Plan each MODEL at every budget, with every solver, under every cost model.

    Each plan is one row of a table. With --output, each row is stored as soon as it is planned.
    After a crash, the same command plans only the missing rows.
    """
    from remat.cli.models import check
    from remat.planning import experiments as api

    for spec in models:  # a misspelt model is refused before hours of planning
        check(spec)
    # Rows that are requested twice are planned once.
    order = list(dict.fromkeys(models))
    lists = (order, *(options[name] for name in ("budgets", "solvers", "costs")))
    wanted = math.prod(len(set(values)) for values in lists)
    missing: Mapping[str, int] = {}
    planned: Counter[str] = Counter()
    with Progress() as progress, _resumable(output):
        shown = 0

        def on_start(rows: Mapping[str, int]) -> None:
            nonlocal missing
            missing = rows
            progress.step(_stage(rows, 0, wanted, jobs, output))

        def on_row(row: ExperimentRow) -> None:
            nonlocal shown
            planned[row.model] += 1
            at = [*missing].index(row.model) + (planned[row.model] == missing[row.model])
            if jobs is None and shown < at < len(missing):
                shown = at
                progress.step(_stage(missing, at, wanted, jobs, output))
            progress.detail(
                f"{planned.total()} of {sum(missing.values())}: {row.model} at {row.label} with {row.solver}"
            )

        found = api.sweep(
            {spec: Named(spec) for spec in order},
            executor=jobs,
            output=output,
            on_start=on_start,
            on_row=on_row,
            **options,
        )
    failed = sum(row.reason is not None for row in found.rows)
    described = {"rows": [asdict(row) for row in found.rows]}
    if not as_json:
        click.echo(str(found))
        if output is not None:
            click.echo(f"written to {output}{_taken(wanted - planned.total(), output)}")
        if failed:
            click.echo(
                f"{failed} of {len(found.rows)} rows have no plan; the reasons stand in the table"
            )
    if failed and failed == len(found.rows):
        fail(
            RematError("no row has a plan; the reasons stand with the rows"),
            described if as_json else None,
        )
    if as_json:
        echo_json(described)


def _stage(
    missing: Mapping[str, int], at: int, wanted: int, jobs: int | None, output: Path | None
) -> str:
    """Return the text that describes the current stage of the sweep.

    A stage is the planning of one model or, with ``--jobs``, of all models.

    Args:
        missing: dict from each model to the number of rows to plan, in the order of planning.
        at: position of the current model in ``missing``.
        wanted: number of requested rows.
        jobs: number of worker processes; None if this process plans.
        output: the table's file; None for no file.
    """
    from remat.report.explanation import counted

    total = sum(missing.values())
    taken = _taken(wanted - total, output)
    if jobs is not None or not missing:
        return f"planning {counted(total, 'row')}{taken}"
    model, rows = list(missing.items())[at]
    place = f"{at + 1} of {len(missing)} models"
    return f"planning {counted(rows, 'row')} of {model} ({place}){taken}"


def _taken(rows: int, output: Path | None) -> str:
    """Return a text that says how many requested rows the table's file already has.

    Args:
        rows: number of these rows; for 0, the result is an empty text.
        output: the table's file.
    """
    from remat.report.explanation import counted

    return f"; {counted(rows, 'row')} taken from {output}" if rows else ""


@contextlib.contextmanager
def _resumable(output: Path | None) -> Iterator[None]:
    """If Ctrl-C interrupts the block, print the command that continues the sweep.

    Args:
        output: the table's file; None for no file, in which case nothing is printed.
    """
    try:
        yield
    except KeyboardInterrupt:
        if output is not None:
            again = shlex.join(["remat", *sys.argv[1:]])
            click.echo(f"what is known stands in {output}.partial; go on with: {again}", err=True)
        raise
