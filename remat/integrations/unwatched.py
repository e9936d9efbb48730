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
from remat.planning.planner import plan_graph
from remat.planning.request import PlanRequest


def plan_unwatched(joint: JointGraph, request: PlanRequest, agree: Pass | None) -> Plan:
    """As `plan_graph` in place, but backward reads no output whose writes would not be noticed.

    Where it would, the step is planned again as one that returns copies of them: what is kept of them then counts
    at its bytes. A saved plan is applied as it is.
    """
    places = unwatched_outputs(joint) if request.plan is None and request.reread_inputs else ()
    if places:
        trial = plan_graph(joint, request)
        places = tuple(k for k in places if k in trial.reread_outputs)
        if not places and other_ranks() is None:
            return trial
    if not places:
        return plan_graph(joint, request, in_place=True, agree=agree)
    fingerprint = joint.fingerprint
    copy_outputs(joint, places)
    made = plan_graph(joint, request, in_place=True, agree=agree)
    return replace(made, fingerprint=fingerprint, copied_outputs=places)
