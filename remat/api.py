"""What people call: plan a graph, compare solvers on it, solve a bare knapsack."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, overload

from remat.errors import ProblemError, RematError
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.instances import Instance
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import check_time_limit
from remat.solvers.run import run as run_solver
from remat.solvers.solution import Solution

if TYPE_CHECKING:
    from remat.graph.budget import Budget, Peak
    from remat.graph.costs import CostModel
    from remat.graph.joint import JointGraph
    from remat.planning import Plan
    from remat.sweep import Frontier
    from remat.together import PlanSet


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


def cost_model(cost: str | CostModel) -> CostModel:
    """A cost model by name, or as it is."""
    if isinstance(cost, str):
        return registry().cost_model(cost)
    from remat.graph.costs import CostModel as Base

    if not isinstance(cost, Base):
        raise ProblemError(
            f"cost is {cost!r}; expected the name of a cost model ({', '.join(registry().cost_models)}) "
            "or an instance of one"
        )
    return cost


@overload
def plan(
    joint: JointGraph,
    budget: float | int | str | Budget | Peak = ...,
    solver: str | Solver = ...,
    cost: str | CostModel = ...,
    time_limit: float | None = ...,
    *,
    plan: Plan | None = ...,
    count_outputs: bool = ...,
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
    count_outputs: bool = ...,
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
    count_outputs: bool = False,
    isolation: str | None = None,
) -> Plan | PlanSet:
    """Decides what one training step keeps and what it computes again.

    Args:
        joint: the captured step; it is not changed. A list of graphs (a model with graph breaks,
            ``remat.capture(…, fullgraph=False)``) is planned under one budget that they share, and
            a `PlanSet` is returned.
        budget: a number from 0 to 1 (share of the bytes that the runtime-optimal partition saves),
            an int above 1 or text such as ``"8GiB"`` (bytes of saved activations), or
            ``Peak("40GiB")`` (bytes of the step's simulated peak).
        solver: who decides: on the whole graph where it can, else by a knapsack.
        cost: cost model: ``"roofline"``, ``"roofline:a100"``, ``"flops"``, ``"unit"``, a plugin's.
        time_limit: seconds for the solver; None: no clock.
        plan: a saved plan to apply to this graph instead of deciding anew.
        count_outputs: count forward's outputs as saved bytes instead of as free.
        isolation: ``"process"``: the solver runs in a process of its own.

    Raises:
        BudgetError: a budget that cannot be read, or below the least possible (which is named).
        PlanError: nothing to differentiate, conflicting tags, or a plan for another graph.
        SolverError: the solver is unknown, unavailable, refuses, raises, or answers wrongly.
    """
    from remat.graph.budget import Budget as BudgetType
    from remat.graph.joint import JointGraph
    from remat.pipelines import apply_plan, prepare
    from remat.sweep import plan_prepared

    # Everything that can be refused is refused before any work is done.
    if plan is not None:
        if not isinstance(joint, JointGraph):
            raise ProblemError("plan= applies one saved plan to one graph, got several graphs")
        return apply_plan(joint, plan)
    asked, model = BudgetType.parse(budget), cost_model(cost)
    decider = registry().solver(solver, isolation=isolation)
    check_time_limit(time_limit)
    if isinstance(joint, (list, tuple)):
        from remat.together import plan_together

        return plan_together(
            joint,
            budget=asked,
            solver=decider,
            cost=model,
            time_limit=time_limit,
            count_outputs=count_outputs,
        )
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph or a list of them: use "
            "remat.capture(model, args)"
        )
    state = prepare(joint, count_outputs=count_outputs)
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
    on_step: Callable[[str], None] | None = None,
) -> Frontier:
    """The best plans over all budgets.

    Args:
        joint: the captured step; it is not changed.
        solver: as in `plan`.
        cost: as in `plan`.
        time_limit: seconds for the solver at each budget; None: no clock.
        on_step: called with a line of text before each step.

    Raises:
        PlanError: nothing to differentiate, or conflicting tags.
        SolverError: as from `plan`.
    """
    from remat.pipelines import prepare
    from remat.sweep import Sweep

    model, decider = cost_model(cost), registry().solver(solver)
    check_time_limit(time_limit)
    sweep = Sweep(
        prepare(joint),
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
) -> Instance:
    """The graph problem that planning a captured step comes down to, ready to be saved as a file.

    Args:
        joint: the captured step; it is not changed.
        cost: cost model behind the costs.
        name: what to call the instance; the name of the joint graph where None.
        source: what it was made from, for people.

    Raises:
        PlanError: nothing to differentiate, or conflicting tags.
        ProblemError: an argument is not what it must be.
    """
    from remat.passes.knapsack import Knapsack
    from remat.passes.min_cut import MinCut, require_tangents
    from remat.pipelines import prepare

    model = cost_model(cost)
    state = prepare(joint)
    require_tangents(state)
    problem = state.lowered(model).problem
    least = sum(problem.size[i] for i in Knapsack.least(state))
    full = sum(problem.size[i] for i in MinCut().solve(state))
    return Instance(
        name=joint.name if name is None else name,
        problem=problem,
        full_bytes=max(full, least),
        least_bytes=least,
        cost=str(model),
        unit=problem.unit,
        source=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One solver at one budget; figures are None where it failed, and ``reason`` says why.

    Attributes:
        solver: name of the solver that was asked.
        budget: the budget as it was asked for.
        decided_by: what decided: the solver, or a cut that met the budget without it.
        capacity: the budget in bytes; for a budget on the peak, what the plan was allowed to save.
        saved_bytes: bytes saved.
        recompute_cost: cost of recomputing, in ``unit``.
        recompute_bound: proven lower bound on it within ``capacity``.
        peak_bytes: simulated peak of the step.
        solve_s: seconds that the solver took to decide this plan.
        plan_s: seconds from prepared graph to finished plan.
        unit: unit of the costs.
        best: whether no other solver has a lower cost at this budget.
        reason: why there is no plan.
    """

    solver: str
    budget: str
    decided_by: str | None = None
    capacity: int | None = None
    saved_bytes: int | None = None
    recompute_cost: int | None = None
    recompute_bound: int | None = None
    peak_bytes: int | None = None
    solve_s: float | None = None
    plan_s: float | None = None
    unit: str | None = None
    best: bool = False
    reason: str | None = None

    @property
    def gap(self) -> float | None:
        """At most this share of the cost is more than the budget needs, 0 to 1.

        None without a plan, and under a budget on the peak: the bound is one on saved bytes.
        """
        cost, bound = self.recompute_cost, self.recompute_bound
        if cost is None or bound is None or self.budget.startswith("peak:"):
            return None
        return (cost - bound) / cost if cost else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Solvers side by side on one joint graph, by one yardstick.

    Attributes:
        graph: name of the joint graph.
        cost: cost model.
        rows: by budget, then by solver, in the order asked for.
    """

    graph: str
    cost: str
    rows: tuple[ComparisonRow, ...]

    def to_json(self) -> str:
        rows = [asdict(r) | {"gap": r.gap} for r in self.rows]
        return json.dumps({"graph": self.graph, "cost": self.cost, "rows": rows}, indent=2) + "\n"

    def __str__(self) -> str:
        from remat.graph.budget import Budget as BudgetType
        from remat.graph.budget import format_bytes
        from remat.planning import format_cost

        wide = max([len("solver"), *(len(r.solver) for r in self.rows)])
        head = f"{'saved':>9} {'recompute':>11}   {'gap':>7} {'peak':>9} {'time':>9}"
        lines = [f"{'budget':>13} {'solver':{wide}} {head}"]
        for r in self.rows:
            name = f"{BudgetType.parse(r.budget).label:>13} {r.solver:{wide}}"
            if r.saved_bytes is None or r.recompute_cost is None:
                lines.append(f"{name} {r.reason}")
                continue
            lines.append(
                f"{name} {format_bytes(r.saved_bytes):>9} "
                f"{format_cost(r.recompute_cost, r.unit or ''):>11} {'*' if r.best else ' '} "
                f"{format_share(r.gap):>7} {format_bytes(r.peak_bytes or 0):>9} {r.solve_s or 0:>7.2f} s"
            )
        return "\n".join(lines)


def format_share(share: float | None) -> str:
    """A share for people, in percent; a dash where there is none."""
    if share is None:
        return "–"
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def compare(
    joint: JointGraph,
    solvers: Iterable[str | Solver] | None = None,
    budgets: Sequence[float | int | str] = (0.2, 0.5, 0.8),
    cost: str | CostModel = "roofline",
    time_limit: float | None = None,
    *,
    on_row: Callable[[ComparisonRow], None] | None = None,
) -> Comparison:
    """Plans one joint graph with several solvers at several budgets.

    A solver that cannot run, refuses, or answers wrongly gets a row with the reason; the others go
    on. Foreign solvers run in processes of their own, so that not even a crash takes the others
    down. An unknown name and a budget that cannot be read are errors at once.

    Args:
        joint: the captured step; it is not changed.
        solvers: names or instances; all that can be used here where None.
        budgets: budgets as `plan` reads them.
        cost: cost model, shared by all.
        time_limit: seconds for each solver on each problem; None: no clock.
        on_row: called with each row as it is known, ``best`` not yet set.
    """
    from remat.graph.budget import Budget as BudgetType
    from remat.pipelines import prepare
    from remat.sweep import plan_prepared

    known = registry()
    names = list(solvers) if solvers is not None else list(known.solver_names())
    asked = [BudgetType.parse(b) for b in budgets]
    for name in names:
        if isinstance(name, str):
            known.solver_class(name)
    model = cost_model(cost)
    check_time_limit(time_limit)
    digest = joint.fingerprint
    state = prepare(joint)
    rows: list[ComparisonRow] = []
    ready: dict[str, Solver] = {}
    for budget in asked:
        for name in names:
            label = name if isinstance(name, str) else name.name
            start = time.perf_counter()
            try:
                if label not in ready:
                    ready[label] = known.solver(name, isolation="foreign")
                p = plan_prepared(
                    state,
                    budget=budget,
                    solver=ready[label],
                    cost=model,
                    time_limit=time_limit,
                    fingerprint=digest,
                )
            except RematError as error:
                rows.append(ComparisonRow(solver=label, budget=str(budget), reason=str(error)))
            else:
                rows.append(
                    ComparisonRow(
                        solver=label,
                        budget=str(budget),
                        decided_by=p.solver,
                        capacity=p.capacity,
                        saved_bytes=p.saved_bytes,
                        recompute_cost=p.recompute_cost,
                        recompute_bound=p.recompute_bound,
                        peak_bytes=p.peak_bytes,
                        solve_s=p.solve_s,
                        plan_s=time.perf_counter() - start,
                        unit=p.unit,
                    )
                )
            if on_row is not None:
                on_row(rows[-1])
    return Comparison(graph=joint.name, cost=str(model), rows=_mark_best(rows))


def _mark_best(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    least: dict[str, tuple[int, int]] = {}
    for r in rows:
        if r.recompute_cost is not None and r.saved_bytes is not None:
            key = (r.recompute_cost, r.saved_bytes)
            least[r.budget] = min(key, least.get(r.budget, key))
    return tuple(
        replace(r, best=(r.recompute_cost, r.saved_bytes) == least.get(r.budget)) for r in rows
    )
