"""The command ``remat diff``: two saved plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from remat.cli.commands import echo_json, json_option, main

if TYPE_CHECKING:
    from remat.planning.plan_diff import PlanDiff

#: Names of nodes that are listed for one plan and one graph; ``--json`` has all.
MOST_NAMES = 40


@main.command()
@click.argument("first", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("second", metavar="B.json", type=click.Path(path_type=Path))
@json_option
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Compare two saved plans: what one keeps and the other does not, and the figures of both.

    A.json and B.json are files of `remat plan --save`, of one model.
    """
    from remat.planning.plan_diff import diffs_of
    from remat.planning.saved_plans import read_plan

    found = diffs_of(read_plan(first), read_plan(second))
    if as_json:
        echo_json({"files": [str(first), str(second)], "graphs": [d.to_dict() for d in found]})
        return
    for k, one in enumerate(found):
        if k:
            click.echo()
        _show(one, str(first), str(second))


def _show(found: PlanDiff, first: str, second: str) -> None:
    from remat.cli import tables

    table = tables.new_table(found.first.graph)
    for name in ("", first, second):
        table.add_column(name, style=None if name else "bold", overflow="fold")
    for row in found.figures:
        table.add_row(*row)
    tables.show(table)
    if not found.same_graph:
        click.echo(
            "the plans are for different graphs, so that equal names need not be equal values: the model, "
            "shapes, the lowering or PyTorch differ"
        )
    for names, file in ((found.only_first, first), (found.only_second, second)):
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        listed = ", ".join(names[:MOST_NAMES]) or "nothing"
        click.echo(f"kept in {file} only: {listed}{more}")
