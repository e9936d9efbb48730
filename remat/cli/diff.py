"""The command ``remat diff``: compare two saved plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import json_option, main
from remat.cli.output import echo_json
from remat.errors import ProblemError

if TYPE_CHECKING:
    from remat.planning.plan import Plan

#: Largest number of node names to print for each plan and graph; ``--json`` prints all names.
MOST_NAMES = 40
#: Fields of a `Plan` that ``--json`` prints for each of the two plans.
_FIELDS = (
    "budget", "solver", "cost", "unit", "capacity", "saved_bytes", "peak_bytes", "planned_peak_bytes",
    "without_peak_bytes", "recompute_cost", "recompute_bound", "step_cost", "without_cost",
)  # fmt: skip


@main.command()
@click.argument("first", metavar="A.json", type=params.INPUT_FILE)
@click.argument("second", metavar="B.json", type=params.INPUT_FILE)
@json_option
def diff(first: Path, second: Path) -> None:
    """Compare two saved plans: show the values that only one plan saves, and the figures of both.

    A.json and B.json are files that `remat plan --save` wrote for one model.
    """
    from remat.planning.plan_file import read_plan
    from remat.planning.plan_set import PlanSet

    read = [read_plan(path) for path in (first, second)]
    sides = [tuple(plan) if isinstance(plan, PlanSet) else (plan,) for plan in read]
    if len(sides[0]) != len(sides[1]):
        raise ProblemError(
            f"the first file holds plans for {len(sides[0])} graphs and the second for {len(sides[1])}; expected "
            "plans of one model, captured with the same options"
        )
    pairs = list(zip(*sides, strict=True))
    graphs = [
        {
            "graph": a.graph,
            "same_graph": a.fingerprint == b.fingerprint,
            "only_first": _saved_only(a, b),
            "only_second": _saved_only(b, a),
            "first": _numbers(a),
            "second": _numbers(b),
        }
        for a, b in pairs
    ]
    if echo_json({"files": [str(first), str(second)], "graphs": graphs}):
        return
    for k, (a, b) in enumerate(pairs):
        if k:
            click.echo()
        _show(a, b, str(first), str(second))


def _show(a: Plan, b: Plan, first: str, second: str) -> None:
    from remat.cli import tables
    from remat.units import some_of

    figures = [_figures(plan) for plan in (a, b)]
    rows = [(name, text, figures[1][name]) for name, text in figures[0].items()]
    tables.show(tables.names_table(("", first, second), rows, a.graph))
    if a.fingerprint != b.fingerprint:
        click.echo(
            "the plans are for different graphs, so that equal names need not be equal values: the model, "
            "shapes, the lowering or PyTorch differ"
        )
    for names, file in ((_saved_only(a, b), first), (_saved_only(b, a), second)):
        click.echo(f"kept in {file} only: {some_of(names, MOST_NAMES) or 'nothing'}")


def _saved_only(plan: Plan, other: Plan) -> list[str]:
    """Return the names of nodes that the first plan saves and the second does not, in the order of the first plan."""
    in_other = {*other.saved, *other.snapshots}
    return list(dict.fromkeys(n for n in (*plan.saved, *plan.snapshots) if n not in in_other))


def _numbers(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan, such as peak and cost, as numbers for ``--json``."""
    return {name: getattr(plan, name) for name in _FIELDS} | {
        "kept": len(plan.saved) + len(plan.snapshots),
        "recomputed": len(plan.recomputed),
        "more": plan.before_after.more,
    }


def _figures(plan: Plan) -> dict[str, str]:
    """Return a dict from the label of each figure of a plan to the figure as text, for the table."""
    from remat.units import format_bytes, format_change, format_cost

    compiled = " as compiled" if plan.planned_peak_bytes else ""
    without, step = plan.without_peak_bytes, plan.step_cost
    recomputed = format_cost(plan.recompute_cost, plan.unit)
    return {
        "budget": plan.requested.label,
        "solver": plan.solver,
        "cost model": plan.cost,
        "kept": f"{len(plan.saved) + len(plan.snapshots):,} nodes",
        "saved": format_bytes(plan.saved_bytes),
        "recomputed": f"{len(plan.recomputed):,} nodes, {recomputed}",
        "peak": format_bytes(plan.peak_bytes) + compiled,
        "peak without remat": format_bytes(without) if without else "–",
        "step": format_cost(step + plan.recompute_cost, plan.unit) if step else "–",
        "beside no remat": format_change(plan.before_after.more),
    }
