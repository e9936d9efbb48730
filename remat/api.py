"""Public functions: plan a graph, compute its frontier, export its problem, solve a standalone problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, overload

from remat.arguments import BUDGET, COST, SOLVER, value_of
from remat.errors import ProblemError
from remat.plugins.registry import registry
from remat.running.jobs import AnyExecutor, check_executor, name_to_send
from remat.solvers.base import Solver
from remat.solvers.instances import Instance
from remat.solvers.problem import Problem, S
from remat.solvers.run import run

if TYPE_CHECKING:
    from remat.graph.joint import JointGraph
    from remat.passes.core.pipeline import Pipeline
    from remat.planning.frontier import Frontier
    from remat.planning.plan import Plan
    from remat.planning.plans import PlanSet
    from remat.planning.request import (
        BudgetOption,
        CostOption,
        HooksOption,
        OffloadOption,
        SolverOption,
    )
    from remat.planning.saved_plans import SavedPlan


def solve(
    problem: Problem[S],
    solver: str | Solver = "auto",
    time_limit: float | None = None,
    *,
    isolation: str | None = None,
) -> S:
    """Solves a bare problem and checks the answer: a knapsack, a graph problem, or a step problem.

    Args:
        problem: what to solve, in plain ints: weights, values and capacity; or a graph.
        solver: a registered name, ``"module:Class"``, or an instance.
        time_limit: seconds; None: no clock.
        isolation: ``"process"``: the solver runs in a process of its own, with a hard deadline and
            a memory limit.

    Raises:
        BudgetError: no answer keeps to the capacity, or none was found; the message says which.
        SolverError: unknown or unavailable solver, or one that refuses, raises or answers wrongly.
        ProblemError: an argument is not what it must be.
    """
    decider = registry().solver(solver, isolation=isolation)
    return run(decider, problem, time_limit=time_limit)


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
    budget: BudgetOption = ...,
    solver: SolverOption = ...,
    cost: CostOption = ...,
    time_limit: float | None = ...,
    *,
    plan: SavedPlan | None = ...,
    pipeline: str | Pipeline | None = ...,
    count_outputs: bool = ...,
    hooks: HooksOption = ...,
    reread_inputs: bool = ...,
    isolation: str | None = ...,
    offload: OffloadOption = ...,
) -> Plan: ...
@overload
def plan(
    joint: Sequence[JointGraph],
    budget: BudgetOption = ...,
    solver: SolverOption = ...,
    cost: CostOption = ...,
    time_limit: float | None = ...,
    *,
    plan: None = ...,
    pipeline: None = ...,
    count_outputs: bool = ...,
    hooks: HooksOption = ...,
    reread_inputs: bool = ...,
    isolation: str | None = ...,
    offload: OffloadOption = ...,
) -> PlanSet: ...
def plan(
    joint: JointGraph | Sequence[JointGraph],
    budget: BudgetOption = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    *,
    plan: SavedPlan | None = None,
    pipeline: str | Pipeline | None = None,
    count_outputs: bool = False,
    hooks: HooksOption = None,
    reread_inputs: bool = True,
    isolation: str | None = None,
    offload: OffloadOption = None,
) -> Plan | PlanSet:
    """Decides what one training step keeps and what it computes again.

    Args:
        joint: the captured step; it is not changed. A list of graphs (a model with graph breaks,
            ``remat.capture(…, fullgraph=False)``) is planned under one budget that they share, and
            a `PlanSet` is returned.
        budget: the peak of the step in bytes, as an int above 1, text such as ``"40GiB"``, or ``Peak("40GiB")``;
            ``Peak(0.5)``: the point between the least peak found, 0, and the peak of budget 1's plan, 1;
            ``Saved("8GiB")``, as text ``"saved:8GiB"``: bytes of saved activations; or a number from 0 to 1: the
            ratio of the bytes that the runtime-optimal partition saves. The default is 1. A ratio below the least
            that any plan saves is raised to it; ``Saved`` bytes below it are an error. `Saved` and ratios bound no
            peak: a `remat.PeakWarning` tells if such a plan does not lower it.
        solver: who decides: on the whole graph if it can, else by a knapsack. A named solver decides alone; ``"auto"``
            takes the best of what several propose.
        cost: cost model: ``"roofline"``, ``"roofline:a100"``, ``"flops"``, ``"unit"``, a plugin's.
        time_limit: seconds for the solver; None: no clock.
        plan: a saved plan to apply to this graph instead of deciding anew: a `Plan`, its JSON text, or a
            path to it. Given beside it, a budget is for a graph that the plan was not made for.
        pipeline: passes to run instead of the default ones, as text or as a pipeline: see
            `remat.default_pipeline`. Its passes carry the budget, the solver and the cost model.
        count_outputs: count forward's outputs as saved bytes instead of as free.
        hooks: what saved tensors pass through on their way to backward: ``"bf16"``, ``"float8"``,
            ``"int8"``, ``"cpu-offload"``, functions ``(pack, unpack)``, or `remat.SavedTensorHooks`.
            What is saved is decided on bytes before packing; ``saved_bytes`` are those after it, and
            a budget on the peak is held by the packed step.
        reread_inputs: whether backward may read the inputs of the step again. With False it reads
            parameters and buffers, and what eager autograd would have saved too; any other input
            may be refilled between forward and backward, as in eager PyTorch, and outputs of the step
            written to. A saved plan carries the option.
        isolation: ``"process"``: the solver runs in a process of its own.
        offload: the link to the host: bytes per second such as ``"25GB/s"``, or ``"pcie4"``, ``"pcie5"``,
            ``"nvlink-c2c"``. Under a budget on the peak of one graph, saved values may then go to the host's
            memory where that costs less time than keeping to the peak otherwise. `Plan.offloaded` names them.

    Raises:
        BudgetError: a budget that cannot be read, or below the least possible (which is named).
        PlanError: nothing to differentiate, conflicting tags, or a plan for another graph.
        SolverError: the solver is unknown, unavailable, refuses, raises, or answers wrongly.
    """
    from remat.planning.plan_set import plan_graphs
    from remat.planning.planner import plan_graph
    from remat.planning.request import PlanRequest

    request = PlanRequest.of(
        budget=budget,
        solver=solver,
        cost=cost,
        time_limit=time_limit,
        plan=plan,
        pipeline=pipeline,
        count_outputs=count_outputs,
        hooks=hooks,
        reread_inputs=reread_inputs,
        isolation=isolation,
        offload=offload,
    )
    if isinstance(joint, (list, tuple)):
        return plan_graphs(joint, request)
    return plan_graph(joint, request)  # type: ignore[arg-type]  # it says what it may be


def default_pipeline(
    budget: BudgetOption = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
) -> Pipeline:
    """The pipeline that `remat.plan` runs, to be printed, edited and handed back to it.

    Args:
        budget: as in `remat.plan`, but no peak.
        solver: as in `remat.plan`.
        cost: as in `remat.plan`.
        time_limit: as in `remat.plan`.

    Raises:
        RematError: an argument that cannot be meant.
    """
    from remat.planning.request import PlanRequest

    return PlanRequest.of(
        budget=budget, solver=solver, cost=cost, time_limit=time_limit
    ).as_pipeline()


def frontier(
    joint: JointGraph,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    *,
    by: str = "saved",
    reread_inputs: bool = True,
    offload: OffloadOption = None,
    executor: AnyExecutor = None,
    on_step: Callable[[str], None] | None = None,
) -> Frontier:
    """The best plans over all budgets.

    Args:
        joint: the captured step; it is not changed.
        solver: as in `plan`; by peak, it is asked for budget 1's plan, and a few around the least peak.
        cost: as in `plan`.
        time_limit: seconds for the solver at each budget; None: no clock.
        by: ``"saved"``: less cost for more saved bytes (``"bytes"`` is an alias); ``"peak"``: less cost for a higher peak of the step.
        reread_inputs: as in `plan`.
        offload: as in `plan`, by peak only: offloading is tried at some of the peaks, and below the lowest.
        executor: what decides at the budgets, some to each worker: any `concurrent.futures.Executor`, a number of
            processes, or None for this process. By peak it is not used: that is one search, each step of which
            builds on those before. Solver and cost model are given by name.
        on_step: called with a line of text before each step.

    Raises:
        PlanError: nothing to differentiate, or conflicting tags.
        ProblemError: ``by`` is something else, not ``"peak"`` beside ``offload``, or the executor cannot be used.
        SolverError: as from `plan`.
    """
    from remat.planning.frontier import Frontier
    from remat.planning.planner import Planner
    from remat.planning.request import PlanRequest

    if by not in ("saved", "bytes", "peak"):
        raise ProblemError(f"by is {by!r}; expected 'saved' or 'peak'")
    request = PlanRequest.without_budget(
        solver=solver,
        cost=cost,
        time_limit=time_limit,
        reread_inputs=reread_inputs,
        offload=offload,
    )
    check_executor(executor)
    if executor is not None:
        name_to_send(value_of(cost), "cost model")
        name_to_send(value_of(solver), "solver")
    planner = Planner.of(joint, request, on_step=on_step)
    return Frontier.of(planner, by, executor=executor, joint=joint)


def instance(
    joint: JointGraph,
    cost: CostOption = COST,
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
    from remat.planning.planner import Planner
    from remat.planning.request import PlanRequest

    planner = Planner.of(joint, PlanRequest.of(cost=cost, reread_inputs=reread_inputs))
    problem = planner.lowered.problem
    return Instance(
        name=joint.name if name is None else name,
        problem=problem,
        full_bytes=planner.full_bytes,
        least_bytes=planner.least_bytes,
        cost=str(planner.request.cost),
        unit=problem.unit,
        source=source,
    )
