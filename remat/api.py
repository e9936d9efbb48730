"""Public functions: plan a captured step, compute its Pareto frontier, export or solve its graph problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, overload

from remat.arguments import BUDGET, COST, SOLVER
from remat.errors import ProblemError
from remat.plugins.registry import registry
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
        BytesOption,
        ChunkOption,
        CostOption,
        HooksOption,
        OffloadOption,
        PoliciesOption,
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
    """Solve a knapsack, graph or step problem, and check the solver's answer.

    Args:
        problem: a `remat.KnapsackProblem` (choose items to save), a `remat.GraphProblem` (choose
            nodes to save) or a `remat.ScheduleProblem` (order all runs of a step; a step problem).
            The field ``capacity`` of each is the memory limit in bytes.
        solver: a registered name, ``"module:Class"``, or a `remat.Solver` instance.
        time_limit: seconds that the solver may take; None: no time limit.
        isolation: ``"process"``: run the solver in a separate process, with a hard deadline and a
            memory limit. None: run it in this process.

    Returns:
        The checked `remat.Solution`; for a `remat.ScheduleProblem` a `remat.Schedule`.

    Raises:
        BudgetError: no answer is within the capacity. For a step problem also: the solver found no
            schedule within the capacity. The message says which of the two happened.
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
    """Wrap a solver in a function with the signature of PyTorch's knapsack functions on floats.

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
    host_memory: BytesOption = ...,
    policies: PoliciesOption = ...,
    chunk: ChunkOption = ...,
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
    host_memory: BytesOption = ...,
    policies: PoliciesOption = ...,
    chunk: ChunkOption = ...,
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
    host_memory: BytesOption = None,
    policies: PoliciesOption = None,
    chunk: ChunkOption = None,
) -> Plan | PlanSet:
    """Decide which values of one training step are saved for backward and which are recomputed.

    Args:
        joint: the captured step; it is not changed. A list of joint graphs, from ``remat.capture(…,
            fullgraph=False)`` of a model with graph breaks, is planned under one shared budget.
        budget: a limit on the peak or on the saved bytes; see `remat.Peak` and `remat.Saved`. An
            int above 1, text such as ``"40GiB"``, or ``Peak("40GiB")`` limits the peak of the step
            in bytes. ``Peak(0.5)`` limits the peak by a ratio: 0 is the least peak found, and 1 is
            the peak of the plan at budget 1. ``Saved("8GiB")``, or ``"saved:8GiB"``, limits the
            bytes of saved activations. A number from 0 to 1, by default 1, limits the saved bytes
            to this ratio of the bytes that the runtime-optimal partition saves. If a ratio allows
            fewer bytes than any plan can save, the limit is the fewest bytes that a plan can save.
            A `remat.Saved` budget below these fewest bytes raises an error. A plain ratio and
            `remat.Saved` do not limit the peak. If a plan under such a budget does not lower the
            peak, a `remat.PeakWarning` says so.
        solver: the solver that decides. A solver of graph problems decides on the whole graph; any
            other solver decides on knapsack problems, whose items are tensors of the graph. A named
            solver decides alone. ``"auto"`` takes the best plan that several solvers propose.
        cost: the cost model: ``"roofline"``, ``"roofline:a100"``, ``"flops"``, ``"unit"``, or the
            name of a plugin's model.
        time_limit: seconds for the solver; None: no time limit.
        plan: a saved plan to apply to this graph instead of deciding again: a `Plan`, its JSON
            text, or a path to the JSON file. A graph without a saved plan is planned under
            ``budget`` if ``budget`` is given too; otherwise such a graph raises an error.
        pipeline: passes to run instead of the default ones, as text or as a pipeline; see
            `remat.default_pipeline`. The budget, the solver and the cost model are options of
            these passes, so they cannot be given as arguments too.
        count_outputs: whether forward's outputs that backward reads count as saved bytes; by
            default they do not.
        hooks: saved-tensor hooks that pack saved values after forward and unpack them in backward:
            ``"bf16"``, ``"float8"``, ``"int8"``, ``"cpu-offload"``, functions ``(pack, unpack)``,
            or `remat.SavedTensorHooks`. The decision counts bytes before packing, and
            `Plan.saved_bytes` counts bytes after packing. A budget on the peak limits the peak of
            the step with packed values.
        reread_inputs: whether backward may read the inputs of the step again. If False, backward
            reads only parameters, buffers, and inputs that eager autograd would have saved too.
            Other inputs may then be overwritten between forward and backward, as in eager PyTorch,
            and so may the outputs of the step. A saved plan records this option.
        isolation: ``"process"``: run the solver in a separate process. None: run it in this
            process.
        offload: speed of the link to the host: bytes per second such as ``"25GB/s"``, or
            ``"pcie4"``, ``"pcie5"``, ``"nvlink-c2c"``, or ``"measured"`` to time the link of the
            current CUDA device. Under a budget on the peak, saved values may then be copied to
            host memory. A value is copied if the copy costs less time than other means to meet the
            budget. `Plan.offloaded` names the copied values. Values that the user's code or
            ``policies`` tags for the host are copied even without ``offload``. Without ``offload``,
            their copies are timed at the speed of ``"pcie4"``.
        host_memory: bytes that copied values may take in host memory at one time, such as
            ``"64GiB"``; None: no limit.
        policies: a dict from patterns of module names to policies for the values of these modules,
            such as ``{"*.self_attn": "save", "*.mlp": "recompute"}``. ``*`` matches dots too. The
            other policies are ``"offload"`` and ``{"budget": remat.Saved("1GiB")}``. The last pattern
            that matches a module decides. The plan follows the policies at every budget. A saved
            plan records the policies.
        chunk: number of chunks of tokens into which the final linear layer and the loss of a
            language model are split, so that the logits are never alive as a whole. ``"auto"``
            takes the cheapest of 1, 2, 4, 8 and 16 chunks within the budget on the peak. Gradients
            may then differ by rounding from those of the unsplit step. None: do not split the loss.

    Returns:
        A `Plan` for one joint graph; a `PlanSet` for a list of joint graphs.

    Raises:
        BudgetError: the budget cannot be parsed, or is too small for any plan. In the second case,
            the message names the least possible budget.
        PlanError: the step has nothing to differentiate, its checkpointing tags conflict, a value
            that must be offloaded cannot be offloaded, or the saved plan is for another graph.
        SolverError: the solver is unknown or unavailable, refuses the problem, raises, or answers
            wrongly.
        ProblemError: an argument is invalid, or two arguments conflict.
        PassError: a pass of ``pipeline`` fails.
    """
    options = dict(locals())  # the arguments only, since no local variable is set yet
    from remat.planning.plan_set import plan_graphs
    from remat.planning.planner import plan_graph
    from remat.planning.request import PlanRequest

    del options["joint"]
    request = PlanRequest.of(**options)
    if isinstance(joint, (list, tuple)):
        return plan_graphs(joint, request)
    return plan_graph(joint, request)  # type: ignore[arg-type]  # other types are refused there


def default_pipeline(
    budget: BudgetOption = BUDGET,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
) -> Pipeline:
    """Return the pipeline of passes that `remat.plan` runs by default.

    The pipeline can be printed, edited, and passed to `remat.plan` as ``pipeline``.

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


def frontier(
    joint: JointGraph,
    solver: SolverOption = SOLVER,
    cost: CostOption = COST,
    time_limit: float | None = None,
    *,
    by: str = "saved",
    reread_inputs: bool = True,
    offload: OffloadOption = None,
    host_memory: BytesOption = None,
    policies: PoliciesOption = None,
    chunk: ChunkOption = None,
    on_step: Callable[[str], None] | None = None,
) -> Frontier:
    """Compute the Pareto frontier of plans: the least recompute cost for every number of bytes.

    Args:
        joint: the captured step; it is not changed.
        solver: as in `plan`. With ``by="peak"`` the solver decides only at budget 1 and near the
            least peak.
        cost: as in `plan`.
        time_limit: seconds for the solver at each budget; None: no time limit.
        by: the bytes that the frontier trades against cost. ``"saved"``, or its alias ``"bytes"``:
            saved bytes. ``"peak"``: bytes of the step's peak.
        reread_inputs: as in `plan`.
        offload: as in `plan`, with ``by="peak"`` only. A frontier without offloading is computed
            first. Offloading is then tried at some of its peaks, and below its lowest peak.
        host_memory: as in `plan`.
        policies: as in `plan`.
        chunk: as in `plan`, but not ``"auto"``.
        on_step: called with a line of text before each stage of the computation.

    Raises:
        PlanError: the step has nothing to differentiate, or its checkpointing tags conflict.
        ProblemError: ``by`` is none of the names above, or ``offload`` is given without
            ``by="peak"``.
        SolverError: as in `plan`.
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
        host_memory=host_memory,
        policies=policies,
        chunk=chunk,
    )
    request.refuse_auto_chunk("frontier")
    planner = Planner.of(joint, request, on_step=on_step)
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
