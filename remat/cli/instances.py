"""The commands for problems as files: ``remat capture`` and ``remat solve``."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remat.cli import params
from remat.cli.commands import (
    capture_model,
    capture_options,
    echo_json,
    json_option,
    main,
    reread_option,
    solver_option,
    takes_request,
    time_limit_option,
    wrong_usage,
)
from remat.cli.progress import Progress
from remat.errors import BudgetError

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.planning.request import PlanRequest
    from remat.solvers.base import Solver
    from remat.solvers.instances import Instance
    from remat.solvers.solution import Checked, GraphSolution, Solution
    from remat.units import Budget


@main.command()
@capture_options
@reread_option
@click.option(
    "-o",
    "--output",
    type=params.OutputFile(),
    required=True,
    help="write to this file; one that ends with .joint is written as graph text, for `remat opt`",
)
@click.option("--name", help="what to call it [default: the file's name]")
@takes_request
def capture(
    model: str,
    overrides: tuple[str, ...],
    output: Path,
    name: str | None,
    request: PlanRequest,
    as_json: bool,
    **options: Any,
) -> None:
    """Write one training step of MODEL to a file: its graph problem, or the joint graph itself.

    The problem is JSON of names and numbers: for `remat solve`, and for solvers elsewhere. The joint
    graph is text: for `remat opt`. In neither can anything run.
    """
    from remat import api
    from remat.graph.text import SUFFIX
    from remat.solvers.instances import save_instance

    with Progress() as progress:
        example, joint, captured_s = capture_model(progress, model, overrides, **options)
        if output.suffix == SUFFIX:
            progress.step("writing the joint graph")
            joint = dataclasses.replace(joint, name=name or output.stem)
            _write_joint(output, joint, captured_s, example.title, as_json=as_json)
            return
        progress.step("making the graph problem")
        source = f"{example.title}; {joint.lower} lowering"
        made = api.instance(
            joint,
            request.cost,
            name=name or output.stem,
            source=source,
            reread_inputs=request.reread_inputs,
        )
        save_instance(output, made)
    if as_json:
        echo_json({**figures(made), "capture_s": captured_s, "file": str(output)})
        return
    _show(_instance_rows(made), f"{made.source}, captured in {captured_s:.1f} s")
    click.echo(f"instance written to {output}")


def _write_joint(
    output: Path, joint: JointGraph, captured_s: float, title: str, *, as_json: bool
) -> None:
    from remat.graph.text import write_joint

    write_joint(output, joint)
    nodes = len(joint.graph.nodes)
    if as_json:
        told = {"name": joint.name, "kind": "joint", "nodes": nodes, "lower": joint.lower}
        more = {"fingerprint": joint.fingerprint, "capture_s": captured_s, "file": str(output)}
        echo_json(told | more)
        return
    click.echo(f"{title}: {nodes:,} nodes, captured in {captured_s:.1f} s")
    click.echo(f"joint graph written to {output}")


@main.command()
@click.argument(
    "file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@solver_option
@click.option(
    "--budget",
    metavar="BUDGET",
    help="bytes, or a ratio of them from 0 to 1 [default: the file's capacity, else 1]",
)
@time_limit_option
@json_option
def solve(
    file: Path, solver: str, budget: str | None, time_limit: float | None, as_json: bool
) -> None:
    """Solve the problem in FILE, such as `remat capture` writes.

    FILE may also be a step problem, or a published graph in networkx's node-link JSON. Its budget is a peak, and a
    ratio is one of the peak of the graph's own order.

    What the solver answers is recomputed in integers, and refused where it is wrong.
    """
    from remat.arguments import BUDGET
    from remat.plugins.registry import registry
    from remat.solvers.instances import load_instance
    from remat.solvers.run import check_time_limit
    from remat.units import Budget

    # Not by a request for plans, which are of graphs: solving takes no PyTorch.
    with wrong_usage("solver"):
        decider = registry().solver(solver)
    with wrong_usage("budget"):
        asked = None if budget is None else Budget.parse(budget)
        if asked is not None and asked.peak_share is not None:
            raise BudgetError(
                f"budget is {asked.label}; a ratio of that kind is one for plans: give bytes such as 40GiB, or for a step "
                "problem a ratio of the peak of its given order, such as 0.5"
            )
    with wrong_usage("time_limit"):
        check_time_limit(time_limit)
    with Progress() as progress:
        progress.step(f"reading {file}")
        instance = load_instance(file)
        progress.step(f"solving {instance.name} with {decider.name}")
        if asked is None and instance.problem.capacity is None:
            asked = Budget.parse(BUDGET.value)
        solved = _solve(instance, decider, asked, time_limit)
    if as_json:
        echo_json(solved)
        return
    title = instance.name + (f": {instance.source}" if instance.source else "")
    _show([*_instance_rows(instance), *_solution_rows(solved)], title)


def _solve(
    instance: Instance, solver: Solver, budget: Budget | None, time_limit: float | None
) -> dict[str, Any]:
    """Solves an instance. The figures are of the checked answer; costs are of what is not saved."""
    from remat.solvers.graph_problem import GraphProblem
    from remat.solvers.problem import KnapsackProblem
    from remat.solvers.run import run
    from remat.units import Budget

    problem = instance.problem
    if not isinstance(problem, (GraphProblem, KnapsackProblem)):
        return _solve_schedule(instance, solver, budget, time_limit)
    if isinstance(problem, GraphProblem):
        full, least = instance.full_bytes or 0, instance.least_bytes or 0
    else:
        full, least = problem.total_weight, 0
    if budget is not None and budget.peak_bytes is not None:
        budget = Budget(nbytes=budget.peak_bytes)  # these problems know one kind of bytes
    capacity = problem.capacity if budget is None else budget.capacity(full=full, least=least)
    solved: GraphSolution | Solution
    if isinstance(problem, GraphProblem):
        solved = run(solver, problem.within(capacity), time_limit=time_limit)
        answer: dict[str, Any] = {
            "saved_bytes": solved.saved_bytes,
            "recompute_cost": solved.cost,
            "recompute_bound": solved.bound,
            "claimed_bound": solved.claimed_bound,
            "saved": list(solved.saved),
            "saved_names": [problem.names[i] for i in solved.saved],
        }
    else:
        solved = run(solver, problem.within(capacity or 0), time_limit=time_limit)
        total, claimed = problem.total_value, solved.claimed_bound
        answer = {
            "saved_bytes": solved.weight,
            "recompute_cost": total - solved.value,
            "recompute_bound": total - solved.bound,
            "claimed_bound": None if claimed is None else total - claimed,
            "saved": list(solved.saved),
        }
    return {
        **_told(instance, budget, capacity, solved),
        **answer,
    }


def _told(
    instance: Instance, budget: Budget | None, capacity: int | None, solved: Checked
) -> dict[str, Any]:
    """What is told of an answer to any problem."""
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
    }


def _solve_schedule(
    instance: Instance, solver: Solver, budget: Budget | None, time_limit: float | None
) -> dict[str, Any]:
    """Solves a step problem; a ratio is one of the peak of its given order, each node running once."""
    from remat.solvers.run import run
    from remat.solvers.schedule_problem import ScheduleProblem, evaluate_schedule

    problem = instance.problem
    assert isinstance(problem, ScheduleProblem)
    given = evaluate_schedule(problem, problem.order)
    capacity = problem.capacity
    if budget is not None:
        share = Fraction(str(1.0 if budget.share is None else budget.share))
        asked = budget.nbytes if budget.peak_bytes is None else budget.peak_bytes
        capacity = math.ceil(share * given.peak_bytes) if asked is None else asked
    solved = run(solver, problem.within(capacity), time_limit=time_limit)
    return {
        **_told(instance, budget, capacity, solved),
        "given_peak_bytes": given.peak_bytes,
        "peak_bytes": solved.peak_bytes,
        "cost": solved.cost,
        "bound": solved.bound,
        "claimed_bound": solved.claimed_bound,
        "once": given.cost,
        "sequence": list(solved.sequence),
    }


def _schedule_rows(solved: dict[str, Any]) -> list[tuple[str, str]]:
    from remat.units import format_bytes, format_cost

    unit, once = solved["unit"], max(1, solved["once"])
    more, bound = solved["cost"] - solved["once"], solved["bound"] - solved["once"]
    over = "" if solved["deterministic"] else "; a clock ended it"
    capacity = solved["capacity"]
    peak = f"{format_bytes(solved['peak_bytes'])} of {format_bytes(solved['given_peak_bytes'])}"
    return [
        (
            "budget",
            "none"
            if capacity is None
            else f"{solved['budget'] or 'of the file'} → {format_bytes(capacity)}",
        ),
        ("peak", f"{peak} in the given order"),
        (
            "run again",
            f"{format_cost(more, unit)}, {more / once:.2%} of all once; no schedule needs less than {bound / once:.2%}",
        ),
        ("status", solved["status"]),
        ("decided by", f"{solved['solver']} in {solved['elapsed_s']:.3f} s{over}"),
    ]


def figures(instance: Instance) -> dict[str, Any]:
    """What an instance is, and how large."""
    from remat.solvers.graph_problem import GraphProblem
    from remat.solvers.schedule_problem import ScheduleProblem

    problem = instance.problem
    found: dict[str, Any] = {
        key: getattr(instance, key) for key in ("name", "kind", "source", "cost", "unit")
    }
    if isinstance(problem, ScheduleProblem):
        edges = sum(map(len, problem.inputs))
        return {**found, "nodes": len(problem), "edges": edges}
    if not isinstance(problem, GraphProblem):
        return {**found, "items": len(problem), "total_bytes": problem.total_weight}
    columns = zip(problem.savable, problem.recomputable, problem.size, strict=True)
    return {
        **found,
        "nodes": len(problem),
        "edges": sum(map(len, problem.inputs)),
        "candidates": sum(save and again and size > 0 for save, again, size in columns),
        "full_bytes": instance.full_bytes,
        "least_bytes": instance.least_bytes,
    }


def _instance_rows(instance: Instance) -> list[tuple[str, str]]:
    from remat.units import format_bytes

    of = figures(instance)
    if instance.kind == "schedule":
        size = f"{of['nodes']:,} nodes, {of['edges']:,} edges"
        return [("problem", f"step of {size}"), ("cost model", instance.cost)]
    if instance.kind == "knapsack":
        size = f"{of['items']:,} items, {format_bytes(of['total_bytes'])} in all"
        return [("problem", f"knapsack of {size}"), ("cost model", instance.cost)]
    return [
        (
            "problem",
            f"graph of {of['nodes']:,} nodes and {of['edges']:,} edges; {of['candidates']:,} nodes "
            "can be saved or recomputed",
        ),
        ("cost model", instance.cost),
        (
            "bytes",
            f"{format_bytes(of['full_bytes'])} saved by the runtime-optimal partition; "
            f"{format_bytes(of['least_bytes'])} is the least",
        ),
    ]


def _solution_rows(solved: dict[str, Any]) -> list[tuple[str, str]]:
    from remat.units import format_bytes, format_cost

    if solved["kind"] == "schedule":
        return _schedule_rows(solved)
    cost, bound, unit = solved["recompute_cost"], solved["recompute_bound"], solved["unit"]
    budget = solved["budget"] or "of the file"
    over = "" if solved["deterministic"] else "; a clock ended it"
    claimed = solved["claimed_bound"]
    claim = "" if claimed is None else f"; claimed, not proven: {format_cost(claimed, unit)}"
    return [
        (
            "budget",
            "none"
            if solved["capacity"] is None
            else f"{budget} → {format_bytes(solved['capacity'])}",
        ),
        ("saved", f"{len(solved['saved'])} values, {format_bytes(solved['saved_bytes'])}"),
        (
            "recomputed",
            f"{format_cost(cost, unit)}; no choice needs less than {format_cost(bound, unit)}{claim}",
        ),
        ("status", solved["status"]),
        ("decided by", f"{solved['solver']} in {solved['elapsed_s']:.3f} s{over}"),
    ]


def _show(rows: list[tuple[str, str]], title: str) -> None:
    from remat.cli import tables

    tables.show(tables.rows_table(rows, title))
