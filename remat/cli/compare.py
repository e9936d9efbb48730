"""The command ``remat compare``: plans of several solvers in one table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import PLANNING, Step, list_option, main, plan_options, takes_step
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.experiments.table import ExperimentRow


@main.command()
@takes_step
@plan_options(*PLANNING)
@list_option(
    "solvers",
    "comma-separated solvers to compare; by default all that can run here. Unless --time-limit is given, those "
    "that may search for minutes then do a twentieth of their work",
    params.SOLVER,
)
@list_option(
    "budgets",
    "comma-separated budgets to plan at: 0.5, 40GiB, peak:0.5, saved:8GiB",
    default="0.2,0.5,0.8",
)
def compare(
    step: Step,
    solvers: tuple[str, ...] | None,
    budgets: tuple[str, ...],
    **planning: Any,
) -> None:
    """Plan MODEL with several solvers at several budgets, and show the plans in one table.

    A star marks the best plans at each budget. The column gap shows how far a plan's cost is above
    a proven lower bound, as a ratio of the cost. A solver that is named with --solvers does the
    same search as in `remat plan`.
    """
    from remat import api
    from remat.cli.tables import cost_text
    from remat.experiments.grid import compare as compare_solvers
    from remat.planning.request import PlanRequest
    from remat.solvers.base import Solver
    from remat.solvers.brief import BRIEF

    parsed = [PlanRequest.of(budget=budget, **planning).budget for budget in budgets]
    names: list[str | Solver] = [*(api.solver_names() if solvers is None else solvers)]
    if solvers is None and planning["time_limit"] is None:
        names = [BRIEF.get(str(name), name) for name in names]
    brief = tuple(solver.name for solver in names if isinstance(solver, Solver))
    with Progress() as progress:
        captured = step.capture(progress)
        total, finished = len(names) * len(budgets), 0

        def count(row: ExperimentRow) -> None:
            nonlocal finished
            finished += 1
            progress.detail(f"{finished} of {total} plans, last {row.solver} at {row.budget}")

        progress.stage(f"comparing {total} plans")
        comparison = compare_solvers(captured.joint, names, parsed, on_row=count, **planning)
        comparison = dataclasses.replace(comparison, brief=brief)
    if not as_json(comparison.to_json()):
        cost = cost_text(comparison.cost, planning["cost"])
        click.echo(f"{captured.title()}; cost model {cost}\n{comparison}")
        if brief:
            click.echo(
                f"{', '.join(brief)}: searched with a twentieth of their work, so that the table comes soon; "
                "named with --solvers they do all of it"
            )
    if all(row.reason is not None for row in comparison.rows):
        raise RematError("no solver found a plan at any of these budgets; the reasons stand above")
