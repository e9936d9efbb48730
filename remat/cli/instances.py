"""The commands for problems in files: ``remat capture`` and ``remat solve``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import Step, json_option, main, plan_options, takes_request, takes_step
from remat.cli.output import as_json
from remat.cli.progress import Progress
from remat.errors import BudgetError, about

if TYPE_CHECKING:
    from remat.planning.request import PlanRequest
    from remat.solvers.base import Solver
    from remat.solvers.instances.instance import Instance
    from remat.units import Budget


@main.command()
@takes_step
@takes_request("cost", "reread_inputs")
@click.option(
    "-o",
    "--output",
    type=params.OutputFile(),
    required=True,
    help="write to this file; if its name ends with .joint, it gets graph text, for `remat opt`",
)
def capture(step: Step, output: Path, request: PlanRequest) -> None:
    """Write one training step of MODEL to a file: as a graph problem, or as a joint graph.

    A graph problem is JSON with names and numbers, for `remat solve` and for other solvers. A joint
    graph is text, for `remat opt`. Neither file contains code that could run.
    """
    from remat import api
    from remat.cli.tables import show_figures
    from remat.graph.text import SUFFIX, write_joint
    from remat.solvers.instances.instance import save_instance

    with Progress() as progress:
        captured = step.capture(progress)
        figures: dict[str, Any]
        if output.suffix == SUFFIX:
            progress.stage("writing the joint graph")
            joint = dataclasses.replace(captured.joint, name=output.stem)
            write_joint(output, joint)
            figures = {"name": joint.name, "kind": "joint", "nodes": len(joint.graph.nodes)}
            figures |= {"lower": joint.lower, "fingerprint": joint.fingerprint}
        else:
            progress.stage("making the graph problem")
            instance = api.instance(
                captured.joint,
                request.cost,
                name=output.stem,
                source=f"{captured.example.title}; {captured.joint.lower} lowering",
                reread_inputs=request.reread_inputs,
            )
            save_instance(output, instance)
            figures = figures_of(instance)
    figures |= {"file": str(output)}
    if not as_json(figures):
        show_figures([figures])


@main.command()
@click.argument("file", metavar="FILE", type=params.INPUT_FILE)
@plan_options("solver", "time_limit")
@click.option(
    "--budget",
    metavar="BUDGET",
    help="limit in bytes, or as a ratio from 0 to 1 [default: the file's capacity, else 1]",
)
@json_option
def solve(file: Path, solver: str, budget: str | None, time_limit: float | None) -> None:
    """Solve the problem in FILE, and print the answer.

    FILE may be a graph problem that `remat capture` wrote, a knapsack problem, a schedule problem, or a published graph
    in networkx's node-link JSON. For a schedule problem or a published graph, the budget limits the peak. If the budget
    on the peak is a ratio, ratio 1 stands for the peak of a step that runs each node once, in FILE's order.

    The solver's answer is checked in integer arithmetic, and a wrong answer is an error.
    """
    from remat.arguments import BUDGET
    from remat.cli.tables import show_figures
    from remat.plugins.registry import registry
    from remat.solvers.instances.instance import load_instance
    from remat.units import Budget

    # `remat solve` does not use `takes_request`, which imports PyTorch, because solving does not need PyTorch.
    with about("solver"):
        decider = registry().solver(solver)
    with about("budget"):
        limit = None if budget is None else Budget.parse(budget)
        if limit is not None and limit.peak_share is not None:
            raise BudgetError(
                f"budget is {limit.label}; a ratio of that kind is one for plans: give bytes such as 40GiB, or for a step "
                "problem a ratio of the peak of its given order, such as 0.5"
            )
    with Progress() as progress:
        progress.stage(f"reading {file}")
        instance = load_instance(file)
        progress.stage(f"solving {instance.name} with {decider.name}")
        if limit is None and instance.problem.capacity is None:
            limit = Budget.parse(BUDGET)
        figures = _solve(instance, decider, limit, time_limit)
    if not as_json(figures):
        show_figures([figures_of(instance)])
        click.echo()
        show_figures([figures], "answer")


def _solve(
    instance: Instance, solver: Solver, budget: Budget | None, time_limit: float | None
) -> dict[str, Any]:
    """Solve a problem within ``budget`` or, if None, the problem's capacity; return the checked answer's figures."""
    from remat.solvers.graph.problem import GraphProblem
    from remat.solvers.problem import KnapsackProblem
    from remat.solvers.run import run
    from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule
    from remat.units import Budget

    problem: Any = instance.problem
    in_order = (
        evaluate_schedule(problem, problem.order) if isinstance(problem, ScheduleProblem) else None
    )
    if in_order is not None:
        full_bytes = in_order.peak_bytes
    elif isinstance(problem, KnapsackProblem):
        full_bytes = problem.total_weight
    else:
        full_bytes = instance.full_bytes or 0
    capacity = problem.capacity
    if budget is not None:
        # Both forms of a budget mean the same bytes, because a problem limits only one kind: saved bytes or the peak.
        budget = Budget(share=budget.share, nbytes=budget.peak_bytes or budget.nbytes)
        capacity = budget.capacity(full_bytes=full_bytes, least=instance.least_bytes or 0)
    solved: Any = run(solver, problem.within(capacity), time_limit=time_limit)

    def as_cost(objective: int) -> int:
        """Return the cost of the values that are not saved, computed from a solver's objective."""
        # Some problems, such as a knapsack, maximise the total value of the saved items.
        return problem.total_value - objective if problem.maximises else objective

    answer: dict[str, Any]
    if in_order is not None:
        answer = {
            "given_peak_bytes": in_order.peak_bytes,
            "peak_bytes": solved.peak_bytes,
            "cost": solved.cost,
            "bound": solved.bound,
            "once": in_order.cost,
            "sequence": list(solved.sequence),
        }
    else:
        answer = {
            "saved_bytes": getattr(solved, problem.bytes_taken),
            "recompute_cost": as_cost(getattr(solved, problem.objective)),
            "recompute_bound": as_cost(solved.bound),
            "saved": list(solved.saved),
        }
    if isinstance(problem, GraphProblem):
        answer["saved_names"] = [problem.names[i] for i in solved.saved]
    claimed = solved.claimed_bound
    return {
        "instance": instance.name,
        "kind": instance.kind,
        "budget": None if budget is None else str(budget),
        "capacity": capacity,
        "solver": solved.solver,
        "status": solved.status.value,
        "deterministic": solved.deterministic,
        "elapsed_s": solved.elapsed_s,
        "unit": instance.unit,
        "claimed_bound": None if claimed is None else as_cost(claimed),
        **answer,
    }


def figures_of(instance: Instance) -> dict[str, Any]:
    """Return name, kind, origin, cost model and sizes of a problem."""
    problem: Any = instance.problem
    figures: dict[str, Any] = {
        key: getattr(instance, key) for key in ("name", "kind", "source", "cost", "unit")
    }
    if instance.kind == "knapsack":
        return {**figures, "items": len(problem), "total_bytes": problem.total_weight}
    figures |= {"nodes": len(problem), "edges": sum(map(len, problem.inputs))}
    if instance.kind == "schedule":
        return figures
    columns = zip(problem.savable, problem.recomputable, problem.size, strict=True)
    return {
        **figures,
        "candidates": sum(save and again and size > 0 for save, again, size in columns),
        "full_bytes": instance.full_bytes,
        "least_bytes": instance.least_bytes,
    }
