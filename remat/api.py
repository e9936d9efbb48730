"""Public functions that plan a captured step, compute its Pareto frontier, and build or solve its graph problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack, overload

from remat.arguments import BUDGET, COST, SOLVER, passes_on
from remat.errors import ProblemError
from remat.options import (
    CostOption,
    KeywordOptions,
    PlanOptions,
    SolverOption,
    StepOptions,
)
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.instances.instance import Instance
from remat.solvers.problem import Problem, S
from remat.solvers.run import run
from remat.units import AnyBudget

if TYPE_CHECKING:
    from torch import fx

    from remat.graph.joint import JointGraph
    from remat.passes.core.pipeline import Pipeline
    from remat.planning.frontier import Frontier
    from remat.planning.plan import Plan
    from remat.planning.plan_set import PlanSet


def solve(
    problem: Problem[S],
    solver: str | Solver = "auto",
    time_limit: float | None = None,
    *,
    isolation: str | None = None,
) -> S:
    """Solve a knapsack, graph or schedule problem, and check the solver's answer.

    Args:
        problem: a `remat.KnapsackProblem` (which items to save), a `remat.GraphProblem` (which nodes
            to save) or a `remat.ScheduleProblem` (the order of all runs of a step). Its field
            ``capacity`` is the memory limit in bytes.
        solver: a registered name, ``"module:Class"``, or a `remat.Solver` instance.
        time_limit: seconds that the solver may take; None: no time limit.
        isolation: ``"process"``: run the solver in a separate process, with a hard deadline and a
            memory limit. None: run it in this process.

    Returns:
        The checked `remat.Solution`; for a `remat.ScheduleProblem` a `remat.Schedule`.

    Raises:
        BudgetError: no answer is within the capacity or, for a schedule problem, the solver found none. The message
            says which of the two happened.
        SolverError: the solver is unknown or unavailable, refuses the problem, raises, or answers
            wrongly.
        ProblemError: an argument has a wrong type or value.
    """
    decider = registry().solver(solver, isolation=isolation)
    return run(decider, problem, time_limit=time_limit)


def solver_names() -> tuple[str, ...]:
    """Return the names of the registered solvers that can run in this environment."""
    return registry().solver_names()


def knapsack_fn(
    solver: str | Solver,
) -> Callable[[Sequence[float], Sequence[float], float], tuple[float, list[int], list[int]]]:
    """Wrap a solver in a function with the signature of PyTorch's knapsack solvers, which take floats.

    Args:
        solver: a registered name, ``"module:Class"``, or a `remat.Solver` instance.

    Returns:
        A function ``(memory, runtimes, max_memory) -> (runtime saved, indices to save, indices to
        allow recomputing)``. ``memory`` and ``runtimes`` have one number per item, and
        ``max_memory`` has the unit of ``memory``. The runtime saved is the total runtime of the
        items to save.

    Raises:
        SolverError: the solver is unknown or unavailable.
    """
    from remat.solvers.knapsack.float_bridge import knapsack_fn as on_floats

    return on_floats(registry().solver(solver))


@overload
def plan(
    joint: JointGraph,
    budget: AnyBudget = ...,
    solver: SolverOption = ...,
    cost: CostOption = ...,
    time_limit: float | None = ...,
    **options: Unpack[KeywordOptions],
) -> Plan: ...
@overload
def plan(
    joint: Sequence[JointGraph],
    budget: AnyBudget = ...,
    solver: SolverOption = ...,
    cost: CostOption = ...,
    time_limit: float | None = ...,
    **options: Unpack[KeywordOptions],
) -> PlanSet: ...
@passes_on(KeywordOptions.__annotations__, PlanOptions)
def plan(
    joint: JointGraph | Sequence[JointGraph],
    budget: AnyBudget = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    **options: Unpack[KeywordOptions],
) -> Plan | PlanSet:
    """Decide which values of one training step are saved for backward and which are recomputed.

    Args:
        joint: the captured step; it is not changed. A list of joint graphs, from ``remat.capture(…,
            fullgraph=False)`` of a model with graph breaks, is planned under one shared budget.
        budget: a limit on the peak or on the saved bytes: ``"40GiB"`` or ``Peak(0.5)`` limits the
            peak, ``Saved("8GiB")`` or a ratio from 0 to 1 the saved bytes. `PlanOptions` has all
            forms.
        solver: the solver that decides, by name or as a `remat.Solver`. ``"auto"`` takes the best
            plan that several solvers propose.
        cost: the cost model, such as ``"roofline:a100"``.
        time_limit: seconds for each call of the solver; None: no time limit.
        options: the other options of `remat.options.PlanOptions`.

    Returns:
        A `Plan` for one joint graph; a `PlanSet` for a list of joint graphs.

    Raises:
        BudgetError: the budget cannot be parsed, or is too small for any plan. If the budget is too
            small, the message names the least possible budget.
        PlanError: the step has nothing to differentiate, its checkpointing tags conflict, a value
            that must be offloaded cannot be offloaded, or the saved plan is for another graph.
        SolverError: the solver is unknown or unavailable, refuses the problem, raises, or answers
            wrongly.
        ProblemError: an argument is invalid, or two arguments conflict.
        PassError: a pass of ``pipeline`` fails.
    """
    from remat.planning.planner import plan_graph
    from remat.planning.request import PlanRequest
    from remat.planning.set_planner import plan_graphs

    request = PlanRequest.of(
        budget=budget, solver=solver, cost=cost, time_limit=time_limit, **options
    )
    if isinstance(joint, (list, tuple)):
        return plan_graphs(joint, request)
    return plan_graph(joint, request)  # type: ignore[arg-type]  # `plan_graph` refuses other types


@passes_on(KeywordOptions.__annotations__, PlanOptions)
def rematerialize(
    gm: fx.GraphModule,
    budget: AnyBudget = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    **options: Unpack[KeywordOptions],
) -> fx.GraphModule:
    """Rewrite the graph of a whole training step or inference so that the step meets a budget at the least cost.

    The graph may come from ``make_fx``, from ``torch.export``, or from a compiler whose step is one graph. The graph
    should be functional, except for writes to inputs at its end. Values that were computed before the first node of
    backward may be computed again after that node. An inference has no backward, so the node at which the most bytes
    are alive takes the place of backward's first node.

    Args:
        gm: the graph, of ATen operators with fake values in ``meta["val"]``; it is not changed.
        budget: as in `plan`. Without a backward, only a limit on the peak is useful.
        solver: as in `plan`.
        cost: as in `plan`.
        time_limit: as in `plan`.
        options: as in `plan`.

    Returns:
        A graph module with the inputs, outputs and results of ``gm``, bit for bit if it runs uncompiled. The graph
        module's ``meta["remat"]`` is the `Plan`. A node that runs again is called ``NAME_again``.

    Raises:
        ProblemError: ``gm`` is no graph of ATen operators with fake values, or an argument is invalid.
        RematError: as in `plan`.
    """
    return graph_pass(budget, solver, cost, time_limit, **options)(gm)


@passes_on(KeywordOptions.__annotations__, PlanOptions)
def graph_pass(
    budget: AnyBudget = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    **options: Unpack[KeywordOptions],
) -> Callable[..., fx.GraphModule]:
    """Build a pass for a compiler's list of passes; the pass rewrites the graph of a step as `rematerialize` does.

    Args:
        budget: as in `rematerialize`.
        solver: as in `rematerialize`.
        cost: as in `rematerialize`.
        time_limit: as in `rematerialize`.
        options: as in `rematerialize`.

    Returns:
        A function ``(gm, example_inputs=()) -> gm``. The returned function ignores ``example_inputs``, because the
        graph has fake values.

    Raises:
        RematError: an argument is invalid. `graph_pass` raises the error, not the returned function.
    """
    from remat.planning.request import PlanRequest

    request = PlanRequest.of(
        budget=budget, solver=solver, cost=cost, time_limit=time_limit, **options
    )

    def rewrite(gm: fx.GraphModule, example_inputs: Sequence[object] = ()) -> fx.GraphModule:
        from remat.graph.whole_graph import joined, whole_graph
        from remat.planning.planner import plan_graph

        joint = whole_graph(gm)
        plan = plan_graph(joint, request)
        module = joined(joint, plan.forward, plan.backward)
        module.meta["remat"] = plan
        return module

    return rewrite


def default_pipeline(
    budget: AnyBudget = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
) -> Pipeline:
    """Return the pipeline of passes that `remat.plan` runs by default.

    The returned pipeline can be printed, edited, and passed to `remat.plan` as ``pipeline``.

    Args:
        budget: as in `remat.plan`, but a budget on the peak is refused.
        solver: as in `remat.plan`.
        cost: as in `remat.plan`.
        time_limit: as in `remat.plan`.

    Raises:
        RematError: an argument is invalid, or the budget limits the peak.
    """
    from remat.planning.request import PlanRequest

    return PlanRequest.of(
        budget=budget, solver=solver, cost=cost, time_limit=time_limit
    ).as_pipeline()


@passes_on(StepOptions.__annotations__, PlanOptions)
def frontier(
    joint: JointGraph,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    *,
    by: str = "saved",
    on_progress: Callable[[str], None] | None = None,
    **options: Unpack[StepOptions],
) -> Frontier:
    """Compute the Pareto frontier of plans: the least recompute cost at each number of saved bytes or of peak bytes.

    Args:
        joint: the captured step; it is not changed.
        solver: as in `plan`. With ``by="peak"`` the solver decides only at budget 1 and at
            budgets near the least peak.
        cost: as in `plan`.
        time_limit: seconds for the solver at each budget; None: no time limit.
        by: the bytes that the frontier trades against cost. ``"saved"``, or its alias ``"bytes"``:
            saved bytes. ``"peak"``: bytes of the step's peak.
        on_progress: called with a line of text before each stage of the computation.
        options: options of `remat.options.PlanOptions` for the values of the step, but ``chunk`` is not ``"auto"``.
            ``offload`` needs ``by="peak"``. Offloading is tried at some peaks of the frontier without offloading, and
            below the lowest of these peaks.

    Raises:
        PlanError: the step has nothing to differentiate, or its checkpointing tags conflict.
        ProblemError: ``by`` is not ``"saved"``, ``"bytes"`` or ``"peak"``, or ``offload`` is given without
            ``by="peak"``.
        SolverError: as in `plan`.
    """
    from remat.planning.frontier import Frontier
    from remat.planning.planner import Planner
    from remat.planning.request import PlanRequest

    if by not in ("saved", "bytes", "peak"):
        raise ProblemError(f"by is {by!r}; expected 'saved' or 'peak'")
    request = PlanRequest.without_budget(solver=solver, cost=cost, time_limit=time_limit, **options)
    request.check("no choice of chunks", "frontier")
    planner = Planner.of(joint, request, on_progress=on_progress)
    return Frontier.of(planner, by)


def instance(
    joint: JointGraph,
    cost: CostOption = COST,
    *,
    name: str | None = None,
    source: str = "",
    reread_inputs: bool = True,
) -> Instance:
    """Build the graph problem that solvers solve when a captured step is planned.

    `remat.save_instance` writes the returned instance to a file.

    Args:
        joint: the captured step; it is not changed.
        cost: the cost model that prices recomputation, as in `plan`.
        name: name of the instance; None: the name of the joint graph.
        source: a description of the step's origin, for human readers.
        reread_inputs: as in `plan`.

    Raises:
        PlanError: the step has nothing to differentiate, or its checkpointing tags conflict.
        ProblemError: an argument has a wrong type or value.
    """
    from remat.planning.planner import Planner
    from remat.planning.request import PlanRequest

    planner = Planner.of(joint, PlanRequest.of(cost=cost, reread_inputs=reread_inputs))
    context = planner.context
    problem = context.lowered.problem
    return Instance(
        name=joint.name if name is None else name,
        problem=problem,
        full_bytes=context.full_bytes,
        least_bytes=context.least_bytes,
        cost=str(context.request.cost),
        unit=problem.unit,
        source=source,
    )
