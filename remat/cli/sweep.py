"""The command ``remat sweep``: plan many models, budgets, solvers and cost models in one table."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from remat.cli import params
from remat.cli.commands import echo_json, json_option, lower_option, main, time_limit_option
from remat.cli.errors import fail
from remat.cli.progress import Progress
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.planning.experiment_table import ExperimentRow


def _table(text: str) -> Path:
    from remat.planning.experiment_table import checked_path

    return checked_path(text)


Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Named:
    """A model given by its MODEL text and built when called, so that workers can receive it.

    Attributes:
        spec: MODEL as typed.
    """

    spec: str

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


def _list(
    default: str, name: str, text: str, item: params.ParamType = click.STRING
) -> Callable[[Command], Command]:
    """Return a decorator for an option with comma-separated values.

    Args:
        default: values if the option is not given.
        name: name of the option in the plural, without dashes.
        text: help of the option.
        item: type of one value.
    """
    return click.option(
        f"--{name}",
        type=params.ListOf(item),
        metavar=f"{name[:-1].upper()},…",
        default=default,
        show_default=True,
        help=text,
    )


@main.command()
@click.argument(
    "models", nargs=-1, required=True, metavar="MODEL…", is_eager=True, callback=params.check_file
)
@_list("0.2,0.5,0.8", "budgets", "budgets, with commas")
@_list("auto", "solvers", "who decides, with commas", params.SOLVER)
@_list("auto", "costs", "cost models, with commas")
@lower_option
@time_limit_option
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="processes that plan at the same time; this one where it is left out",
)
@click.option(
    "-o",
    "--output",
    type=params.Checked("path", _table),
    metavar="FILE",
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

    Each row is written as soon as it is known. After a crash, the same command continues with the
    missing rows.
    """
    from remat.cli.models import check
    from remat.planning import experiments as api

    for spec in models:  # a misspelt model is refused before hours of planning
        check(spec)
    # Rows that are asked for twice are planned once.
    each = len(set(budgets)) * len(set(solvers)) * len(set(costs))
    order = list(dict.fromkeys(models))
    known: Counter[str] = Counter()
    with Progress() as progress, _resumable(output):
        progress.step(_stage(order, 0, each, jobs))
        shown = 0

        def on_row(row: ExperimentRow) -> None:
            nonlocal shown
            known[row.model] += 1
            at = order.index(row.model) + (known[row.model] == each)
            if jobs is None and shown < at < len(order):
                shown = at
                progress.step(_stage(order, at, each, jobs))
            progress.detail(
                f"{known.total()} of {each * len(order)}: {row.model} at {row.label} with {row.solver}"
            )

        found = api.sweep(
            {spec: Named(spec) for spec in order},
            budgets=budgets,
            solvers=solvers,
            costs=costs,
            time_limit=time_limit,
            lower=lower,
            executor=jobs,
            output=output,
            on_row=on_row,
        )
    failed = sum(row.reason is not None for row in found.rows)
    described = {"rows": [asdict(row) for row in found.rows]}
    if not as_json:
        click.echo(str(found))
        if output is not None:
            click.echo(f"written to {output}")
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


def _stage(order: Sequence[str], at: int, each: int, jobs: int | None) -> str:
    """Return the name of the current stage: one model, or with several processes all models.

    Args:
        order: the models in the order of planning.
        at: index of the current model.
        each: number of rows per model.
        jobs: number of processes; None for this process.
    """
    if jobs is not None:
        return f"planning {each * len(order)} rows"
    return f"planning {each} rows of {order[at]} ({at + 1} of {len(order)} models)"


@contextlib.contextmanager
def _resumable(output: Path | None) -> Iterator[None]:
    """Print the command that continues the sweep if Ctrl-C interrupts the block.

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
