"""Read saved plans, and find the plan that was made for a graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from remat.errors import PlanError, ProblemError
from remat.files import MAX_RECORD_BYTES, read_as, read_record
from remat.graph.joint import JointGraph, operators_digest
from remat.planning.plan import Plan
from remat.planning.plan_set import PlanSet
from remat.plugins.registry import registry

#: A plan, or the plans of all graphs of a step: as an object, as JSON text, or as the path of a JSON file.
SavedPlan = Plan | PlanSet | str | Path


def read_known_plan(plan: SavedPlan) -> Plan | PlanSet:
    """Read saved plans as `read_plan` does; raise an error if a plan names an unknown cost model.

    Raises:
        ProblemError: this installation does not know the cost model of a plan.
    """
    saved = read_plan(plan)
    for each in (saved,) if isinstance(saved, Plan) else saved:
        registry().cost_model(each.cost)
    return saved


def read_plan(plan: SavedPlan) -> Plan | PlanSet:
    """Return a plan, or the plans of all graphs of a step, from an object, JSON text or the path of a JSON file.

    Raises:
        PlanError: the value has another type, the file cannot be read, or the text is no JSON of plans.
    """
    if isinstance(plan, (Plan, PlanSet)):
        return plan
    if not isinstance(plan, (str, Path)):
        raise PlanError(
            f"plan is a {type(plan).__name__}; expected a remat.Plan or PlanSet, its JSON text, or a "
            "path to it"
        )
    try:
        if str(plan).lstrip().startswith("{"):
            return _read(str(plan))
        return read_as("plan", plan, _read, MAX_RECORD_BYTES)
    except ProblemError as error:
        raise PlanError(str(error)) from None


def _read(text: str) -> Plan | PlanSet:
    """Parse a plan from JSON text, or the plans of all graphs of a step if the text has the key ``remat_plans``."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None  # `read_record` below refuses this text, with the reason
    several = isinstance(data, dict) and PlanSet.form.key in data
    return read_record(PlanSet, text) if several else read_record(Plan, text)


def plan_for(
    joint: JointGraph,
    saved: Plan | PlanSet,
    *,
    fingerprint: str,
    nth: int = 0,
    others: bool = False,
) -> Plan | None:
    """Return the saved plan made for a graph, or None if there is none and the graph may be planned anew.

    Args:
        joint: the graph.
        saved: a plan, or the plans of all graphs of a step.
        fingerprint: digest of the graph.
        nth: number of graphs with this fingerprint for which a plan was returned before. Equal graphs get the plans of
            their fingerprint in turn.
        others: whether a graph for which there is no saved plan may be planned instead.

    Raises:
        PlanError: there is no saved plan for the graph, and the graph may not be planned instead. Either ``others`` is
            False, or every plan was made for another lowering or version of PyTorch.
    """
    plans = (saved,) if isinstance(saved, Plan) else saved.plans
    matches = [p for p in plans if p.fingerprint == fingerprint]
    if matches:
        return matches[nth % len(matches)]
    could_be = any((p.lower, p.torch) == (joint.lower, torch.__version__) for p in plans)
    # If no plan can match any graph of this process, the user has probably given wrong plans. Planning all graphs would
    # hide this mistake.
    if others and could_be:
        return None
    graph = f"'{joint.name}' ({fingerprint[:12]}…)"
    fault = f"none of the {len(plans)} plans is for graph {graph}"
    if isinstance(saved, Plan):
        fault = (
            f"this plan is for graph '{saved.graph}' ({saved.fingerprint[:12]}…), not for {graph}"
        )
    hint = (
        "; or give a budget beside the plans, under which graphs without a plan are planned when they "
        'are met: options={"plan": plans, "budget": 0.5}'
    )
    raise PlanError(f"{fault}: {why_not_for(joint, plans)}{hint if could_be else ''}")


def why_not_for(joint: JointGraph, plans: Sequence[Plan]) -> str:
    """Return a text that explains why no saved plan matches a graph, and what the user can do."""
    lowers = {p.lower for p in plans}
    if joint.lower not in lowers:
        lowering = sorted(lowers)[0]
        return (
            f"made for the lowering '{lowering}', and this graph is lowered to '{joint.lower}': use it with "
            f"lower='{lowering}', or plan a graph captured with lower='{joint.lower}'"
        )
    versions = {p.torch for p in plans}
    if torch.__version__ not in versions:
        return (
            f"made with PyTorch {sorted(versions)[0]}, and this is {torch.__version__}, which traces other "
            "graphs: plan again"
        )
    why = (
        "other operators, so it is another model, the model has changed, or torch.compile broke it up where the "
        "capture did not (torch.compile(…, fullgraph=True) tells), or an option of Inductor that changes what is "
        "traced (fallback_random) was set for only one of both"
    )
    # If only the operators differ, Dynamo may have split the model into other graphs.
    if operators_digest(joint) in {p.operators for p in plans}:
        why = (
            "the same operators in the same order, so shapes, dtypes, constants or options of the model "
            "have changed, or operators were declared pure"
        )
    return f"this graph has {why}: plan again"
