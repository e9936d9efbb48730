"""The default passes before and after the decision what to save, and pipelines of passes parsed from text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from remat.errors import ProblemError
from remat.graph.capture.fake import repair_aliases
from remat.graph.capture.regions import separate_calls
from remat.graph.collection import paused_collection
from remat.graph.costs import CostModel
from remat.graph.costs.auto import is_for_cpu
from remat.graph.costs.base import node_costs
from remat.graph.joint import JointGraph, operators_digest
from remat.graph.memory.storages import Memories
from remat.graph.memory.user_mutations import copy_outputs, user_mutable_inputs
from remat.graph.policies import Policies
from remat.passes.core import pipeline_text
from remat.passes.core.base import Pass
from remat.passes.core.control import Fixpoint
from remat.passes.core.pipeline import Pipeline
from remat.passes.core.state import Costs, State
from remat.passes.decide.budgeted import Budgeted
from remat.passes.decide.policies import has_policies, tag_budgets, tag_policies
from remat.passes.hooks.offload_saved import OffloadSaved
from remat.passes.hooks.saved_tensor_hooks import PackSaved
from remat.passes.joint.cleanup_recompute_tags import CleanupRecomputeTags
from remat.passes.joint.cse import CommonSubexpressions
from remat.passes.joint.dce import DeadCode
from remat.passes.packing.pairs import SavedTensorHooks
from remat.passes.split.functionalize_rng import FunctionalizeRng
from remat.passes.split.partition import Partition
from remat.passes.split.raise_getitems import RaiseGetitems
from remat.passes.split.reorder_backward import ReorderBackward
from remat.plugins.registry import registry
from remat.running.workspace import defer_workspaces, note_workspaces
from remat.solvers.base import Solver
from remat.units import Budget

#: Passes that run before the tagging by policies. After it, equal calls with different tags could no longer be merged.
_BEFORE_POLICIES: tuple[Pass, ...] = (DeadCode(), CommonSubexpressions())
_AFTER_POLICIES: tuple[Pass, ...] = (CleanupRecomputeTags(),)
#: Passes that normalise a joint graph before any decision.
PREPARE: tuple[Pass, ...] = (*_BEFORE_POLICIES, *_AFTER_POLICIES)
#: Passes that split a joint graph into a forward and a backward module by a decision.
SPLIT: tuple[Pass, ...] = (Partition(), FunctionalizeRng(), ReorderBackward(), RaiseGetitems())


@dataclass(frozen=True, slots=True)
class PassManager(Pipeline):
    """A pipeline that can be parsed from text. The text may name every registered pass, solver and cost model.

    Example: ``PassManager.parse("dce,cse,min-cut,knapsack(solver=cpsat,budget=saved:8GiB),partition")``
    """

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        passes: Mapping[str, type[Pass]] | None = None,
        readers: Mapping[type, Callable[[str], Any]] | None = None,
    ) -> PassManager:
        """Parse a pipeline from text: names separated by commas, options and nested passes in parentheses.

        Args:
            text: for example ``"fixpoint(dce,cse),min-cut(ban-reductions=false),partition"``.
            passes: the passes that the text may name, by name; None: all registered passes.
            readers: functions that parse the text of an option, by the option's type. Such functions are needed only
                for types other than numbers, booleans, text, solvers, cost models and budgets.

        Raises:
            ProblemError: the text cannot be parsed, or the order of the passes is invalid. If a single place in the
                text is at fault, the message shows this place.
        """
        registered = registry()
        registered.learn_operators()
        return cls(
            pipeline_text.read_pipeline(
                text,
                passes=registered.passes if passes is None else passes,
                readers={
                    Solver: registered.solver,
                    CostModel: registered.cost_model,
                    Budget: Budget.parse,
                    **(readers or {}),
                },
            )
        )


#: The default pipeline in parts, whose order is checked once.
_NORMALISE, _CLASSIFY, _SPLIT = map(PassManager, (_BEFORE_POLICIES, _AFTER_POLICIES, SPLIT))


@paused_collection()
def prepare(
    joint: JointGraph,
    *,
    in_place: bool = False,
    count_outputs: bool = False,
    hooks: SavedTensorHooks | None = None,
    reread_inputs: bool = True,
    policies: Policies | None = None,
    deciding: Budgeted | None = None,
    at_budget: bool = False,
    chunk: Pass | None = None,
) -> State:
    """Run the passes that precede decisions; return the prepared graph, from which many plans can be made.

    Args:
        joint: the captured step.
        in_place: whether to change ``joint`` itself instead of a copy.
        count_outputs: as in `remat.plan`.
        hooks: functions that pack and unpack saved tensors. All plans that are made from the state use these hooks.
        reread_inputs: as in `remat.plan`.
        policies: as in `remat.plan`. None: ignore policies, and the regions that the user's code marks.
        deciding: the pass that decides which values a module saves if a policy gives the module a budget of its own.
            None: ignore budgets of modules, as for a saved plan.
        at_budget: False: the budgets that policies give to modules must hold for every decision that is made from the
            state. True: only for the decision at the budget of ``deciding``.
        chunk: the pass that splits the loss into chunks; None: leave the loss whole.
    """
    state = replace(
        initial_state(
            joint, in_place=in_place, count_outputs=count_outputs, reread_inputs=reread_inputs
        ),
        hooks=hooks,
    )
    state = _NORMALISE.run(state, in_place=True, verify=False).state
    tags = policies is not None and has_policies(state, policies)
    # The step without remat has neither policies nor chunks, so it is prepared apart.
    plain: State | None = None
    if tags or chunk is not None:
        plain = _after_policies(replace(state, joint=state.joint.copy()))
    if chunk is not None:
        manager = PassManager((chunk, *_BEFORE_POLICIES))
        state = manager.run(state, in_place=True, verify=False).state
    if policies is not None and tags:
        tag_policies(state, policies)
    state = _after_policies(state)
    if policies is not None and deciding is not None:
        tag_budgets(state, policies, deciding, at_budget=at_budget)
    return replace(state, policies=str(policies or ""), plain=plain)


def _after_policies(state: State) -> State:
    """In place, run the passes between the tagging of nodes by policies and the decision what to save."""
    return _CLASSIFY.run(state, in_place=True, verify=False).state


def initial_state(
    joint: JointGraph, *, in_place: bool, count_outputs: bool, reread_inputs: bool = True
) -> State:
    """Return a captured graph as a state on which no pass has run; arguments as in `prepare`."""
    # `user_mutable` and `operators` are computed before any pass runs. After equal nodes are merged, the graph no
    # longer shows which inputs and operators the user's code has.
    state = State(
        joint=joint if in_place else joint.copy(),
        count_outputs=count_outputs,
        user_mutable=user_mutable_inputs(joint),
        reread_inputs=reread_inputs,
        operators=operators_digest(joint),
    )
    if not reread_inputs:
        # The user may write to outputs before backward, so the step returns copies, and backward reads the originals.
        copy_outputs(state.joint)
    separate_calls(state.joint.graph)
    repair_aliases(state.joint.graph, state.joint.memories, by_kernel=joint.lower == "eager")
    return state


def with_copies(state: State, places: Collection[int]) -> State:
    """Change a prepared graph, in place, to return copies of the user's outputs at positions ``places``."""
    with state.edit():
        copy_outputs(state.joint, places)
    return state


@paused_collection()
def split(state: State) -> State:
    """Split a state's graph into forward and backward modules, as the state's decision says; return the new state.

    Without a decision, all values that backward reads are saved, except those tagged for recomputation.
    """
    pipeline, last = _SPLIT, list[Pass]()
    if state.decision is not None and state.decision.offloads:
        last.append(OffloadSaved())
    if state.hooks is not None:
        last.append(PackSaved.of(state.hooks))
    if last:
        pipeline = PassManager((*SPLIT, *last))
    return pipeline.run(state, in_place=True, verify=False).state


def modules_of(state: State) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward module of a state that `split` returned."""
    assert state.forward is not None
    assert state.backward is not None
    return state.forward, state.backward


def for_walk(state: State) -> tuple[fx.GraphModule, fx.GraphModule, int, Memories]:
    """Return the arguments for `StepWalk`, which simulates memory, from a state that `split` returned."""
    return *modules_of(state), state.joint.num_fwd_outputs, state.joint.memories


def count_workspaces(state: State, cost: CostModel, *, later: bool = False) -> None:
    """Record operators' workspaces on a CPU, so that peaks include them; do nothing if the cost model is for a GPU.

    Args:
        state: the prepared graph.
        cost: the cost model.
        later: whether a node's workspace is measured only when its bytes are first read.
    """
    # Simulated peaks of an eager graph count workspaces. Inductor's operators run on other layouts, so only estimated
    # peaks count those of its graphs.
    if is_for_cpu(cost):
        graph, compiled = state.joint.graph, state.joint.lower == "inductor"
        if later or compiled:
            defer_workspaces(graph, compiled=compiled)
        else:
            note_workspaces(graph)


def step_costs_of(state: State, cost: CostModel, *, required: bool = False) -> Sequence[int]:
    """Return the cost of one run of each node of a step, by position; empty if backward cannot be priced.

    Raises:
        ProblemError: the cost model cannot price backward, and ``required`` is set.
    """
    late = [i for i, only_backward in enumerate(state.roles.tangent_closure) if only_backward]
    try:
        backward = node_costs(state.index, state.storages, cost, late)
    except ProblemError:
        if required:
            raise
        return ()
    # Both lists have an entry for every position. One list prices the nodes that forward can run, the other list the
    # nodes that only backward runs. An entry is 0 if the other list prices the node.
    return [a + b for a, b in zip(state.get(Costs(cost)), backward, strict=True)]


def with_agreement(pipeline: Pipeline, agree: Pass) -> Pipeline:
    """Return a pipeline with the pass ``agree`` before each partition pass; a pipeline that has it is unchanged."""

    def inserted(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
        extended: list[Pass] = []
        for p in passes:
            if isinstance(p, Fixpoint):
                extended.append(replace(p, passes=inserted(p.passes)))
            else:
                extended += [agree, p] if isinstance(p, Partition) else [p]
        return tuple(extended)

    # The user's pipeline may have the pass, and one exchange between ranks suffices.
    if any(type(p) is type(agree) for p in pipeline.flat()):
        return pipeline
    return replace(pipeline, passes=inserted(pipeline.passes))
