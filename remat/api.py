"""What people call: plan a graph, compare solvers on it, solve a bare knapsack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, overload

from remat.errors import ProblemError
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.instances import Instance
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import check_time_limit
from remat.solvers.run import run as run_solver
from remat.solvers.solution import Solution

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.graph.joint import JointGraph
    from remat.passes.core.pipeline import Pipeline
    from remat.passes.packing.pairs import Pack, SavedTensorHooks, Unpack
    from remat.planning.frontier import Frontier
    from remat.planning.plan import Plan
    from remat.planning.plan_set import PlanSet
    from remat.units import Budget, Peak


def solve(
    problem: KnapsackProblem,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
    *,
    isolation: str | None = None,
) -> Solution:
    """Solves a 0/1 knapsack and checks the answer.

    Args:
        problem: weights, values and capacity, all ints.
        solver: a registered name, ``"module:Class"``, or an instance.
        time_limit: seconds; None: no clock.
        isolation: ``"process"``: the solver runs in a process of its own, with a hard deadline and
            a memory limit.

    Raises:
        SolverError: unknown or unavailable solver, or one that refuses, raises or answers wrongly.
        ProblemError: an argument is not what it must be.
    """
    return run_solver(
        registry().solver(solver, isolation=isolation), problem, time_limit=time_limit
    )


def solver_names() -> tuple[str, ...]:
    """The names of the solvers that can be used here and now."""
    return registry().solver_names()


def knapsack_fn(
    solver: str | Solver,
) -> Callable[[Sequence[float], Sequence[float], float], tuple[float, list[int], list[int]]]:
    """A solver in the float signature that PyTorch uses.

    Returns:
        A function ``(memory, runtimes, max_memory) -> (runtime saved, indices to save, indices to
        allow recomputing)``.
    """
    from remat.solvers.float_bridge import knapsack_fn as bridge

    return bridge(registry().solver(solver))


@overload
def plan(
    joint: JointGraph,
    budget: float | int | str | Budget | Peak = ...,
    solver: str | Solver = ...,
    cost: str | CostModel = ...,
    time_limit: float | None = ...,
    *,
    plan: Plan | None = ...,
    pipeline: str | Pipeline | None = ...,
    count_outputs: bool = ...,
    hooks: str | tuple[Pack, Unpack] | SavedTensorHooks | None = ...,
    reread_inputs: bool = ...,
    isolation: str | None = ...,
) -> Plan: ...
@overload
def plan(
    joint: Sequence[JointGraph],
    budget: float | int | str | Budget | Peak = ...,
    solver: str | Solver = ...,
    cost: str | CostModel = ...,
    time_limit: float | None = ...,
    *,
    plan: None = ...,
    pipeline: None = ...,
    count_outputs: bool = ...,
    hooks: str | tuple[Pack, Unpack] | SavedTensorHooks | None = ...,
    reread_inputs: bool = ...,
    isolation: str | None = ...,
) -> PlanSet: ...
def plan(
    joint: JointGraph | Sequence[JointGraph],
    budget: float | int | str | Budget | Peak = 0.5,
    solver: str | Solver = "auto",
    cost: str | CostModel = "roofline",
    time_limit: float | None = None,
    *,
    plan: Plan | None = None,
    pipeline: str | Pipeline | None = None,
    count_outputs: bool = False,
    hooks: str | tuple[Pack, Unpack] | SavedTensorHooks | None = None,
    reread_inputs: bool = True,
    isolation: str | None = None,
) -> Plan | PlanSet:
    """Decides what one training step keeps and what it computes again.

    Args:
        joint: the captured step; it is not changed. A list of graphs (a model with graph breaks,
            ``remat.capture(…, fullgraph=False)``) is planned under one budget that they share, and
            a `PlanSet` is returned.
        budget: a number from 0 to 1 (share of the bytes that the runtime-optimal partition saves),
            an int above 1 or text such as ``"8GiB"`` (bytes of saved activations), or
            ``Peak("40GiB")`` (bytes of the step's simulated peak). A share below the least that any
            plan saves is raised to that; bytes below it are an error.
        solver: who decides: on the whole graph where it can, else by a knapsack.
        cost: cost model: ``"roofline"``, ``"roofline:a100"``, ``"flops"``, ``"unit"``, a plugin's.
        time_limit: seconds for the solver; None: no clock.
        plan: a saved plan to apply to this graph instead of deciding anew.
        pipeline: passes to run instead of the default ones, as text or as a manager: see
            `remat.default_pipeline`. Its passes carry the budget, the solver and the cost model.
        count_outputs: count forward's outputs as saved bytes instead of as free.
        hooks: what saved tensors pass through on their way to backward: ``"bf16"``, ``"float8"``,
            ``"int8"``, ``"cpu-offload"``, functions ``(pack, unpack)``, or `remat.SavedTensorHooks`.
            What is saved is decided on bytes before packing; ``saved_bytes`` are those after it, and
            a budget on the peak is held by the packed step.
        reread_inputs: whether backward may read the inputs of the step again. With False it reads
            parameters and buffers, and what eager autograd would have saved too; any other input
            may be refilled between forward and backward, as in eager PyTorch. A saved plan carries
            the option.
        isolation: ``"process"``: the solver runs in a process of its own.

    Raises:
        BudgetError: a budget that cannot be read, or below the least possible (which is named).
        PlanError: nothing to differentiate, conflicting tags, or a plan for another graph.
        SolverError: the solver is unknown, unavailable, refuses, raises, or answers wrongly.
    """
    from remat.graph.joint import JointGraph
    from remat.passes.packing.pairs import SavedTensorHooks
    from remat.planning.frontier import plan_prepared
    from remat.planning.pipelines import apply_plan, default_pipeline, plan_by_pipeline, prepare
    from remat.units import Budget as BudgetType

    # Fingerprints know of what plugins declare.
    registry().learn_operators()
    # Everything that can be refused is refused before any work is done.
    passed_through = None if hooks is None else SavedTensorHooks.of(hooks)
    if plan is not None:
        if not isinstance(joint, JointGraph):
            raise ProblemError("plan= applies one saved plan to one graph, got several graphs")
        return apply_plan(joint, plan, hooks=passed_through, reread_inputs=reread_inputs)
    if pipeline is not None:
        if hooks is not None:
            raise ProblemError(
                "hooks= does not go together with pipeline=: end the pipeline with the pass "
                "'saved-tensor-hooks(pair=float8)'"
            )
        if not isinstance(joint, JointGraph):
            raise ProblemError("pipeline= runs on one graph, got several graphs")
        if (budget, solver, cost, time_limit) != (0.5, "auto", "roofline", None):
            raise ProblemError(
                "budget, solver, cost and time_limit are options of the pipeline's own passes when "
                f"pipeline= is given: '{default_pipeline(budget, solver, cost, time_limit)}'"
            )
        return plan_by_pipeline(
            joint,
            pipeline,
            count_outputs=count_outputs,
            reread_inputs=reread_inputs,
            fingerprint=joint.fingerprint,
        )
    asked, model = BudgetType.parse(budget), registry().cost_model(cost)
    decider = registry().solver(solver, isolation=isolation)
    check_time_limit(time_limit)
    if isinstance(joint, (list, tuple)):
        from remat.planning.plan_set import plan_together

        return plan_together(
            joint,
            budget=asked,
            solver=decider,
            cost=model,
            time_limit=time_limit,
            count_outputs=count_outputs,
            hooks=passed_through,
            reread_inputs=reread_inputs,
        )
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph or a list of them: use "
            "remat.capture(model, args)"
        )
    state = prepare(
        joint, count_outputs=count_outputs, hooks=passed_through, reread_inputs=reread_inputs
    )
    return plan_prepared(
        state,
        budget=asked,
        solver=decider,
        cost=model,
        time_limit=time_limit,
        fingerprint=joint.fingerprint,
    )


def frontier(
    joint: JointGraph,
    solver: str | Solver = "auto",
    cost: str | CostModel = "roofline",
    time_limit: float | None = None,
    *,
    reread_inputs: bool = True,
    on_step: Callable[[str], None] | None = None,
) -> Frontier:
    """The best plans over all budgets.

    Args:
        joint: the captured step; it is not changed.
        solver: as in `plan`.
        cost: as in `plan`.
        time_limit: seconds for the solver at each budget; None: no clock.
        reread_inputs: as in `plan`.
        on_step: called with a line of text before each step.

    Raises:
        PlanError: nothing to differentiate, or conflicting tags.
        SolverError: as from `plan`.
    """
    from remat.planning.frontier import Sweep
    from remat.planning.pipelines import prepare

    model, decider = registry().cost_model(cost), registry().solver(solver)
    check_time_limit(time_limit)
    sweep = Sweep(
        prepare(joint, reread_inputs=reread_inputs),
        fingerprint=joint.fingerprint,
        solver=decider,
        cost=model,
        time_limit=time_limit,
        on_step=on_step,
    )
    return sweep.frontier()


def instance(
    joint: JointGraph,
    cost: str | CostModel = "roofline",
    *,
    name: str | None = None,
    source: str = "",
    reread_inputs: bool = True,
) -> Instance:
    """The graph problem that planning a captured step comes down to, ready to be saved as a file.

    Args:
        joint: the captured step; it is not changed.
        cost: cost model behind the costs.
        name: what to call the instance; the name of the joint graph where None.
        source: what it was made from, for people.
        reread_inputs: as in `plan`.

    Raises:
        PlanError: nothing to differentiate, or conflicting tags.
        ProblemError: an argument is not what it must be.
    """
    from remat.passes.decide.budgeted import least_decision
    from remat.passes.decide.min_cut import RuntimeOptimalCut, require_tangents
    from remat.planning.pipelines import prepare

    model = registry().cost_model(cost)
    state = prepare(joint, reread_inputs=reread_inputs)
    require_tangents(state)
    problem = state.lowered(model).problem
    least = sum(problem.size[i] for i in least_decision(state))
    full = sum(problem.size[i] for i in state.get(RuntimeOptimalCut()))
    return Instance(
        name=joint.name if name is None else name,
        problem=problem,
        full_bytes=max(full, least),
        least_bytes=least,
        cost=str(model),
        unit=problem.unit,
        source=source,
    )
