"""What people call: plan a graph, compare solvers on it, solve a bare knapsack."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from remat.errors import ProblemError, RematError
from remat.plugins.registry import registry
from remat.solvers.base import Solver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import check_time_limit
from remat.solvers.run import run as run_solver
from remat.solvers.solution import Solution

if TYPE_CHECKING:
    from remat.graph.budget import Budget
    from remat.graph.costs import CostModel
    from remat.graph.joint import JointGraph
    from remat.planning import Plan


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


def plan(
    joint: JointGraph,
    budget: float | int | str | Budget = 0.5,
    solver: str | Solver = "auto",
    cost: str | CostModel = "roofline",
    time_limit: float | None = None,
    *,
    plan: Plan | None = None,
    count_outputs: bool = False,
    isolation: str | None = None,
) -> Plan:
    """Decides what one training step keeps and what it computes again.

    Args:
        joint: the captured step; it is not changed.
        budget: a number from 0 to 1 (share of the bytes that the runtime-optimal partition saves),
            an int above 1 or text such as ``"8GiB"`` (bytes of saved activations).
        solver: who picks among the expensive candidates.
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
    from remat.pipelines import apply_plan, plan_prepared, prepare

    # Everything that can be refused is refused before any work is done.
    if plan is not None:
        return apply_plan(joint, plan)
    asked, model = BudgetType.parse(budget), cost_model(cost)
    decider = registry().solver(solver, isolation=isolation)
    check_time_limit(time_limit)
    state = prepare(joint, count_outputs=count_outputs)
    return plan_prepared(
        state,
        budget=asked,
        solver=decider,
        cost=model,
        time_limit=time_limit,
        fingerprint=joint.fingerprint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One solver at one budget; figures are None where it failed, and ``reason`` says why.

    Attributes:
        solver: name of the solver that was asked.
        budget: the budget as it was asked for.
        decided_by: what decided: the solver, or a cut that met the budget without it.
        capacity: the budget in bytes.
        saved_bytes: bytes saved.
        recompute_cost: cost of recomputing, in ``unit``.
        recompute_bound: proven lower bound on it at this budget.
        peak_bytes: simulated peak of the step.
        solve_s: seconds that the solver took.
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
        rows = [asdict(r) for r in self.rows]
        return json.dumps({"graph": self.graph, "cost": self.cost, "rows": rows}, indent=2) + "\n"

    def __str__(self) -> str:
        from remat.graph.budget import format_bytes
        from remat.planning import format_cost

        lines = [
            f"{'budget':>8} {'solver':12} {'saved':>10} {'recompute':>12} {'bound':>12} {'time':>9}"
        ]
        for r in self.rows:
            if r.saved_bytes is None or r.recompute_cost is None:
                lines.append(f"{r.budget:>8} {r.solver:12} {r.reason}")
                continue
            unit = r.unit or ""
            mark = "*" if r.best else " "
            lines.append(
                f"{r.budget:>8} {r.solver:12} {format_bytes(r.saved_bytes):>10} "
                f"{format_cost(r.recompute_cost, unit):>12}{mark}"
                f"{format_cost(r.recompute_bound or 0, unit):>12} {r.plan_s or 0:>8.3f}s"
            )
        return "\n".join(lines)


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
    from remat.pipelines import plan_prepared, prepare

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
