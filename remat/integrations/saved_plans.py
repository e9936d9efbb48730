"""Saved plans: read from where they are, and matched with the graphs they were made for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from remat.errors import PlanError
from remat.planning.mismatch import why_not_for
from remat.planning.plan import Plan
from remat.planning.plan_set import PlanSet

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph


def read_plan(plan: Plan | PlanSet | str | Path) -> Plan | PlanSet:
    """A plan, or the plans of several graphs, given as such, as JSON text, or as a path.

    Raises:
        PlanError: it can be read as none of them.
    """
    if isinstance(plan, (Plan, PlanSet)):
        return plan
    if not isinstance(plan, (str, Path)):
        raise PlanError(
            f"plan is a {type(plan).__name__}; expected a remat.Plan or PlanSet, its JSON text, or a "
            "path to it"
        )
    text = str(plan)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(plan).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"plan '{plan}' cannot be read: {error}") from None
    return PlanSet.from_json(text) if '"remat_plans"' in text[:200] else Plan.from_json(text)


def plan_for(joint: JointGraph, plan: Plan | PlanSet) -> Plan:
    """The plan of a set that was made for a graph.

    Raises:
        PlanError: none was.
    """
    if isinstance(plan, Plan):
        return plan
    digest = joint.fingerprint
    for p in plan:
        if p.fingerprint == digest:
            return p
    raise PlanError(
        f"none of the {len(plan)} plans is for graph '{joint.name}' ({digest[:12]}…): "
        f"{why_not_for(joint, plan.plans)}"
    )
