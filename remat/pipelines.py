"""The default pipeline, composed: passes from the registry, solvers and cost models handed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from remat.errors import PlanError, ProblemError
from remat.graph.budget import Budget
from remat.graph.fake import repair_aliases
from remat.graph.joint import JointGraph
from remat.passes import manager
from remat.passes.analysis import Analysis
from remat.passes.base import Choice, Pass, State
from remat.planning import Plan, finish
from remat.plugins.registry import registry

#: Passes that bring a joint graph into shape before anything is decided.
PREPARE = "dce,cse,cleanup-recompute-tags,classify,dist-from-backward"
#: Passes that decide.
DECIDE = "min-cut,knapsack"
#: Passes that turn a decision into two modules.
SPLIT = "partition,functionalize-rng,reorder-backward,raise-getitems"


@dataclass(frozen=True, slots=True)
class PassManager(manager.PassManager):
    """A pipeline whose text may name every registered pass, solver and cost model.

    ``PassManager.parse("dce,cse,min-cut,knapsack(solver=cpsat,budget=8GiB),partition")``
    """

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        passes: Mapping[str, type[Pass]] | None = None,
        analyses: Mapping[str, type[Analysis[Any]]] | None = None,
        read: Mapping[str, Callable[[str], Any]] | None = None,
    ) -> PassManager:
        """Reads a pipeline; see `remat.passes.manager.PassManager.parse`."""
        known = registry()
        parsed = manager.PassManager.parse(
            text,
            passes=known.passes if passes is None else passes,
            analyses=known.analyses if analyses is None else analyses,
            read={
                "solver": known.solver,
                "cost": known.cost_model,
                "budget": Budget.parse,
                **(read or {}),
            },
        )
        return cls(parsed.passes)


def prepare(joint: JointGraph, *, in_place: bool = False, count_outputs: bool = False) -> State:
    """Runs the passes that come before any decision; one such state serves many plans."""
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args)"
        )
    registry().learn_operators()
    state = State(joint=joint if in_place else joint.copy(), count_outputs=count_outputs)
    repair_aliases(state.joint.graph)
    return PassManager.parse(PREPARE).run(state, in_place=True, verify=False).state


def split(state: State) -> State:
    """Runs the passes that turn a decision (or none: what the user wrote) into two modules."""
    return PassManager.parse(SPLIT).run(state, in_place=True, verify=False).state


def apply_plan(joint: JointGraph, plan: Plan, *, in_place: bool = False) -> Plan:
    """Splits a joint graph by a saved plan.

    Raises:
        PlanError: the plan was made for another graph; both digests are named.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan is a {type(plan).__name__}; expected a remat.Plan, for example from "
            "remat.Plan.from_json(text)"
        )
    digest = joint.fingerprint
    if digest != plan.fingerprint:
        raise PlanError(
            f"this plan is for graph '{plan.graph}' ({plan.fingerprint[:12]}…), not for "
            f"'{joint.name}' ({digest[:12]}…): model, shapes, lowering, or PyTorch have changed; "
            "plan again"
        )
    state = replace(
        prepare(joint, in_place=in_place),
        decision=plan.decision,
        choice=Choice(
            capacity=plan.capacity,
            full_bytes=plan.full_bytes,
            least_bytes=plan.least_bytes,
            solver=plan.solver,
            items=plan.items,
            deterministic=plan.deterministic,
        ),
    )
    return finish(
        split(state),
        cost=registry().cost_model(plan.cost),
        budget=plan.budget,
        fingerprint=digest,
    )
