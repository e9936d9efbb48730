"""Plans for steps that nobody watches between forward and backward: there is a partitioner, and no backend around it.

Backward may read an output again. A write to one is an error that autograd raises, or our backend; of the outputs
that neither sees, a step returns copies.
"""

from __future__ import annotations

from dataclasses import replace

from remat.graph.joint import JointGraph
from remat.graph.refills import copy_outputs, unwatched_outputs
from remat.passes.core.base import Pass
from remat.passes.ranks.protocol import other_ranks
from remat.planning.plan import Plan
from remat.planning.planner import Planner, plan_graph
from remat.planning.request import PlanRequest


def plan_unwatched(joint: JointGraph, request: PlanRequest, agree: Pass | None) -> Plan:
    """As `plan_graph` in place, but backward reads no output whose writes would not be noticed.

    Where it would, the step is planned again as one that returns copies of them: what is kept of them then counts
    at its bytes. A saved plan is applied as it is.
    """
    places = unwatched_outputs(joint) if request.plan is None else ()
    if places:
        places, made = _reread(joint, request, places)
        if made is not None:
            return made
    if not places:
        return plan_graph(joint, request, in_place=True, agree=agree)
    fingerprint = joint.fingerprint
    copy_outputs(joint, places)
    made = plan_graph(joint, request, in_place=True, agree=agree)
    return replace(made, fingerprint=fingerprint, copied_outputs=places)


def _reread(
    joint: JointGraph, request: PlanRequest, places: tuple[int, ...]
) -> tuple[tuple[int, ...], Plan | None]:
    """Those outputs of some that backward reads; and the plan, if backward reads none and no rank has to agree."""
    agrees = other_ranks() is not None
    if request.pipeline is not None:
        made = plan_graph(joint, request)
        found = tuple(k for k in places if k in made.reread_outputs)
        return found, None if found or agrees else made
    planner = Planner.of(joint, request)
    decided = planner.decide(request.budget)
    found = tuple(k for k in places if k in planner.reread_outputs(decided))
    return found, None if found or agrees else planner.plan(decided)
