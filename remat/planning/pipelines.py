"""The default pipeline, composed: passes from the registry, solvers and cost models handed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from remat.errors import PlanError, ProblemError
from remat.graph.collection import without_collection
from remat.graph.costs import CostModel, Roofline
from remat.graph.fake import repair_aliases
from remat.graph.joint import JointGraph, operators_digest
from remat.graph.refills import refillable_inputs
from remat.graph.regions import separate_calls
from remat.passes.core import pipeline_text
from remat.passes.core.base import Pass
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.control import Composite
from remat.passes.core.pipeline import Pipeline
from remat.passes.core.state import Analysis, State
from remat.passes.decide.budgeted import Budgeted
from remat.passes.decide.knapsack import Knapsack
from remat.passes.decide.min_cut import MinCut, require_tangents
from remat.passes.decide.solve_graph import SolveGraph
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.passes.packing.pairs import SavedTensorHooks
from remat.passes.split.partition import Partition
from remat.planning.mismatch import why_not_for
from remat.planning.plan import Plan, finish
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.run import check_time_limit
from remat.units import Budget, Peak

#: Passes that bring a joint graph into shape before anything is decided.
PREPARE = "dce,cse,cleanup-recompute-tags,classify,dist-from-backward"
#: Passes that turn a decision into two modules.
SPLIT = "partition,functionalize-rng,reorder-backward,raise-getitems"


@dataclass(frozen=True, slots=True)
class PassManager(Pipeline):
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
        readers: Mapping[type, Callable[[str], Any]] | None = None,
    ) -> PassManager:
        """Reads a pipeline: names separated by commas, options and nested passes in parentheses.

        Args:
            text: for example ``"fixpoint(dce,cse),min-cut(ban-reductions=false),partition"``.
            passes: the passes that may be named; the registered ones where None.
            analyses: the analyses that may be named; the registered ones where None.
            readers: how to read options of further types: not numbers, booleans, text, analyses,
                solvers, cost models or budgets.

        Raises:
            ProblemError: the text cannot be read, or the order is refused; where it can, the
                message points at the column.
        """
        known = registry()
        return cls(
            pipeline_text.read_pipeline(
                text,
                passes=known.passes if passes is None else passes,
                analyses=known.analyses if analyses is None else analyses,
                readers={
                    Solver: known.solver,
                    CostModel: known.cost_model,
                    Budget: Budget.parse,
                    **(readers or {}),
                },
            )
        )


@without_collection
def prepare(
    joint: JointGraph,
    *,
    in_place: bool = False,
    count_outputs: bool = False,
    hooks: SavedTensorHooks | None = None,
    reread_inputs: bool = True,
) -> State:
    """Runs the passes that come before any decision; one such state serves many plans.

    Args:
        joint: the captured step.
        in_place: work on this graph instead of on a copy.
        count_outputs: as in `remat.plan`.
        hooks: what saved tensors pass through, in every plan that the state is split for.
        reread_inputs: as in `remat.plan`.
    """
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args)"
        )
    state = replace(
        shaped(joint, in_place=in_place, count_outputs=count_outputs, reread_inputs=reread_inputs),
        hooks=hooks,
    )
    return PassManager.parse(PREPARE).run(state, in_place=True, verify=False).state


def shaped(
    joint: JointGraph, *, in_place: bool, count_outputs: bool, reread_inputs: bool = True
) -> State:
    """A captured graph before any pass has run."""
    registry().learn_operators()
    check_reread(reread_inputs)
    state = State(
        joint=joint if in_place else joint.copy(),
        count_outputs=count_outputs,
        refillable=refillable_inputs(joint),
        reread_inputs=reread_inputs,
        operators=operators_digest(joint),
    )
    separate_calls(state.joint.graph)
    memories = state.joint.memories
    repair_aliases(state.joint.graph, memories, by_kernel=joint.lower == "eager")
    return state


def check_reread(reread_inputs: object) -> None:
    """Refuses what is neither True nor False.

    Raises:
        ProblemError: it is neither.
    """
    if type(reread_inputs) is not bool:
        raise ProblemError(
            f"reread_inputs is {reread_inputs!r}; expected True (backward may read the inputs of the "
            "step again) or False (it may not, so that they can be refilled before it)"
        )


@without_collection
def split(state: State) -> State:
    """Runs the passes that turn a decision (or none: what the user wrote) into two modules."""
    manager = PassManager.parse(SPLIT)
    if state.hooks is not None:
        manager = PassManager((*manager.passes, PackSaved.of(state.hooks)))
    return manager.run(state, in_place=True, verify=False).state


def decide(
    *, budget: Budget, solver: Solver, cost: CostModel, time_limit: float | None
) -> tuple[Pass, ...]:
    """The passes that decide, the cut that a share refers to first."""
    return MinCut(), deciding_pass(budget=budget, solver=solver, cost=cost, time_limit=time_limit)


def deciding_pass(
    *, budget: Budget, solver: Solver, cost: CostModel, time_limit: float | None
) -> Budgeted:
    """The pass that decides: on the whole graph where the solver can, else by a knapsack."""
    kind = SolveGraph if solver.graph else Knapsack
    return kind(solver=solver, budget=budget, cost=cost, time_limit=time_limit or 0.0)


def default_pipeline(
    budget: float | int | str | Budget | Peak = 0.5,
    solver: str | Solver = "auto",
    cost: str | CostModel = "roofline",
    time_limit: float | None = None,
) -> PassManager:
    """The pipeline that `remat.plan` runs, to be printed, edited and handed back to it.

    Args:
        budget: as in `remat.plan`, but no peak.
        solver: as in `remat.plan`.
        cost: as in `remat.plan`.
        time_limit: as in `remat.plan`.

    Raises:
        RematError: an argument that cannot be meant.
    """
    asked = Budget.parse(budget)
    if asked.peak_bytes is not None:
        raise ProblemError(
            f"budget is {asked.label}: a peak is searched for over many plans, which no single "
            "pipeline does; give a share or bytes, or call remat.plan without a pipeline"
        )
    check_time_limit(time_limit)
    model = registry().cost_model(cost)
    deciding = decide(
        budget=asked, solver=registry().solver(solver), cost=model, time_limit=time_limit
    )
    prepare, split = (PassManager.parse(text).passes for text in (PREPARE, SPLIT))
    return PassManager((*prepare, *deciding, *split))


def read_pipeline(pipeline: str | Pipeline) -> Pipeline:
    """A whole pipeline, from a joint graph to its two halves, as text or as it is.

    Raises:
        ProblemError: it cannot be read, or does not partition.
    """
    made = PassManager.parse(pipeline) if isinstance(pipeline, str) else pipeline
    if not isinstance(made, Pipeline):
        raise ProblemError(
            f"pipeline is a {type(pipeline).__name__}; expected text, for example "
            f"'{default_pipeline()}', or a remat.PassManager"
        )
    if not any(isinstance(p, Partition) for p in made.flat()):
        raise ProblemError(
            f"pipeline '{made}' does not partition: put 'partition' behind what decides"
        )
    return made


def with_agreement(pipeline: Pipeline, agree: Pass) -> Pipeline:
    """A pipeline with a pass right before its partition, unless it has one of that kind."""

    def inserted(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
        found: list[Pass] = []
        for p in passes:
            if isinstance(p, Composite):
                found.append(replace(p, passes=inserted(p.passes)))
            else:
                found += [agree, p] if isinstance(p, Partition) else [p]
        return tuple(found)

    if any(type(p) is type(agree) for p in pipeline.flat()):
        return pipeline
    return replace(pipeline, passes=inserted(pipeline.passes))


def plan_by_pipeline(
    joint: JointGraph,
    pipeline: str | Pipeline,
    *,
    in_place: bool = False,
    count_outputs: bool = False,
    reread_inputs: bool = True,
    fingerprint: str,
) -> Plan:
    """The plan that a pipeline of the caller's comes to; verified like every other.

    Raises:
        ProblemError: the pipeline cannot be read, or does not partition.
        PlanError: nothing to differentiate, or a rule of the verifier is broken.
        PassError: one of its passes failed.
    """
    made = read_pipeline(pipeline)
    state = shaped(
        joint, in_place=in_place, count_outputs=count_outputs, reread_inputs=reread_inputs
    )
    require_tangents(state)
    state = made.run(state, in_place=True).state
    budgeted = [p for p in made.flat() if isinstance(p, Budgeted)]
    return finish(
        state,
        cost=budgeted[-1].cost if budgeted else Roofline(),
        budget=str(budgeted[-1].budget if budgeted else Budget(share=1.0)),
        fingerprint=fingerprint,
    )


def apply_plan(
    joint: JointGraph,
    plan: Plan,
    *,
    in_place: bool = False,
    hooks: SavedTensorHooks | None = None,
    reread_inputs: bool = True,
) -> Plan:
    """Splits a joint graph by a saved plan.

    Raises:
        PlanError: the plan was made for another graph (both digests are named), or it may read
            inputs again where that is not wanted.
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
            f"'{joint.name}' ({digest[:12]}…): {why_not_for(joint, (plan,))}"
        )
    check_reread(reread_inputs)
    if plan.reread_inputs and not reread_inputs:
        raise PlanError(
            f"this plan for '{plan.graph}' may read inputs again in backward, but reread_inputs is "
            "False; plan again with remat.plan(joint, …, reread_inputs=False): the saved plan carries "
            "the option"
        )
    state = replace(
        prepare(joint, in_place=in_place, hooks=hooks, reread_inputs=plan.reread_inputs),
        decision=plan.decision,
        choice=DecisionInfo(
            capacity=plan.capacity,
            full_bytes=plan.full_bytes,
            least_bytes=plan.least_bytes,
            solver=plan.solver,
            items=plan.items,
            deterministic=plan.deterministic,
            region_budget=Budget.parse(plan.region_budget).share if plan.region_budget else None,
            least_because=plan.least_because,
        ),
    )
    return finish(
        split(state),
        cost=registry().cost_model(plan.cost),
        budget=plan.budget,
        fingerprint=digest,
    )
