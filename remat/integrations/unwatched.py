"""Plans for a user's own AOTAutograd call, without the backend's wrapper around the compiled step.

Backward may read an output of the step again. The backend refuses a write to such an output, and autograd one to a
tensor that it saved itself. The step returns copies of outputs whose writes neither of them would see.
"""

from __future__ import annotations

from dataclasses import replace

from remat.graph.joint import JointGraph
from remat.graph.user_mutations import copy_outputs, unwatched_outputs
from remat.passes.core.base import Pass
from remat.planning.pipelines import with_copies
from remat.planning.plan import Plan
from remat.planning.planner import Planner, plan_graph
from remat.planning.request import PlanRequest


def plan_unwatched(joint: JointGraph, request: PlanRequest, agree: Pass | None) -> Plan:
    """Plan a graph in place such that backward reads no output whose writes would go unseen.

    If the first decision reads such outputs, the step returns copies of them and is decided again: what backward
    keeps of them then counts at its bytes. A saved plan is applied as it is.
    """
    places = unwatched_outputs(joint) if request.plan is None else ()
    if not places:
        return plan_graph(joint, request, in_place=True, agree=agree)
    if request.pipeline is not None:
        return _by_pipeline(joint, request, agree, places)
    planner = Planner.of(joint, request, in_place=True)
    decided = planner.decide(request.budget)
    reread = planner.reread_outputs(decided)
    copied = tuple(k for k in places if k in reread)
    if copied:
        state = with_copies(planner.state, copied)
        planner = Planner(state, planner.request, fingerprint=planner.fingerprint)
        decided = planner.decide(request.budget)
    return replace(planner.plan(decided, agree), copied_outputs=copied)


def _by_pipeline(
    joint: JointGraph, request: PlanRequest, agree: Pass | None, places: tuple[int, ...]
) -> Plan:
    """Plan by a pipeline; only a run of the whole pipeline shows which outputs backward reads."""
    trial = plan_graph(joint, request)
    copied = tuple(k for k in places if k in trial.reread_outputs)
    if not copied and agree is None:
        return trial
    fingerprint = joint.fingerprint
    copy_outputs(joint, copied)
    made = plan_graph(joint, request, in_place=True, agree=agree)
    return replace(made, fingerprint=fingerprint, copied_outputs=copied)
