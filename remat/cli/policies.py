"""The command ``remat policies``: list the modules of a model, and what a plan does in each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from remat.cli.commands import PLANNING, Step, main, takes_request, takes_step
from remat.cli.output import as_json
from remat.cli.progress import Progress

if TYPE_CHECKING:
    from remat.planning.request import PlanRequest
    from remat.report.by_module import ModuleRow


@main.command()
@takes_step
@takes_request("budget", "solver", *PLANNING)
def policies(step: Step, request: PlanRequest) -> None:
    """List the modules of MODEL, and what a plan saves and recomputes in each.

    The column "forward cost" is the cost of running a module's forward once, which the step pays
    again if the whole module is recomputed. The last line is code to paste: it calls torch.compile
    with policies that describe this plan. Change the policies as you want.
    """
    from remat.cli.tables import show_rows
    from remat.planning.planner import plan_graph
    from remat.report.by_module import module_rows, policies_of

    with Progress() as progress:
        captured = step.capture(progress)
        progress.stage("planning")
        plan = plan_graph(captured.joint, request, on_progress=progress.detail)
        rows = module_rows(plan.uses())
    to_paste = {p.pattern: p.value for p in request.policies.given} or policies_of(rows)
    modules = [_figures(row) for row in rows]
    if as_json({"modules": modules, "policies": to_paste, "unit": plan.unit}):
        return
    click.echo(f"{captured.title()}; budget {plan.requested.label}")
    show_rows(modules, unit=plan.unit)
    given = {"budget": str(request.budget), "policies": to_paste}
    if request.offload is not None:
        given["offload"] = str(request.offload)
    if request.host_memory is not None:
        given["host_memory"] = str(request.host_memory)
    if not to_paste:
        click.echo(
            "no module is saved or recomputed as a whole, so no policies describe this plan:"
        )
    click.echo(f'model = torch.compile(model, backend="remat", options={json.dumps(given)})')


def _figures(row: ModuleRow) -> dict[str, Any]:
    total = row.total
    return {
        "pattern": row.pattern,
        "modules": len(row.modules),
        "saved_bytes": total.saved_bytes,
        "offloaded_bytes": total.offloaded_bytes,
        "forward_cost": total.cost,
        "recompute_cost": total.recompute_cost,
        "treatment": row.treatment,
    }
