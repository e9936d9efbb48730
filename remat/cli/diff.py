"""The command ``remat diff``: compare two saved plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import json_option, main
from remat.cli.output import as_json
from remat.errors import ProblemError

if TYPE_CHECKING:
    from remat.planning.plan import Plan

#: Largest number of node names to print for each plan and graph; ``--json`` prints all names.
MOST_NAMES = 40
#: Fields of a `Plan` that are shown for each of the two plans.
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
    from remat.cli.tables import show_figures
    from remat.planning.plan_file import read_plan
    from remat.planning.plan_set import PlanSet
    from remat.units import some_of

    read = [read_plan(path) for path in (first, second)]
    sides = [tuple(plan) if isinstance(plan, PlanSet) else (plan,) for plan in read]
    if len(sides[0]) != len(sides[1]):
        raise ProblemError(
            f"the first file holds plans for {len(sides[0])} graphs and the second for {len(sides[1])}; expected "
            "plans of one model, captured with the same options"
        )
    graphs: list[dict[str, Any]] = [
        {
            "graph": a.graph,
            "same_graph": a.fingerprint == b.fingerprint,
            "only_first": _saved_only(a, b),
            "only_second": _saved_only(b, a),
            "first": _numbers(a),
            "second": _numbers(b),
        }
        for a, b in zip(*sides, strict=True)
    ]
    if as_json({"files": [str(first), str(second)], "graphs": graphs}):
        return
    for graph, plans in zip(graphs, zip(*sides, strict=True), strict=True):
        show_figures(list(map(_shown, plans)), str(graph["graph"]), ("", str(first), str(second)))
        if not graph["same_graph"]:
            click.echo(
                "the plans are for different graphs, so that equal names need not be equal values: the model, "
                "shapes, the lowering or PyTorch differ"
            )
        for names, file in ((graph["only_first"], first), (graph["only_second"], second)):
            click.echo(f"kept in {file} only: {some_of(names, MOST_NAMES) or 'nothing'}")


def _saved_only(plan: Plan, other: Plan) -> list[str]:
    """Return the names of nodes that the first plan saves and the second does not, in the order of the first plan."""
    in_other = {*other.saved, *other.snapshots}
    return list(dict.fromkeys(n for n in (*plan.saved, *plan.snapshots) if n not in in_other))


def _shown(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan for people: the cost of the whole step, and None for a figure that is unknown."""
    return _numbers(plan) | {
        "step_cost": plan.before_after.cost if plan.step_cost else None,
        "without_cost": plan.before_after.without_cost if plan.step_cost else None,
        "planned_peak_bytes": plan.planned_peak_bytes or None,
    }


def _numbers(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan, such as peak and cost."""
    return {name: getattr(plan, name) for name in _FIELDS} | {
        "kept": len(plan.saved) + len(plan.snapshots),
        "recomputed": len(plan.recomputed),
        "more": plan.before_after.more,
    }
