"""Solvers side by side on one joint graph: a row for each solver at each budget."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction

from remat.arguments import COST, as_list, value_of
from remat.errors import RematError
from remat.graph.joint import JointGraph
from remat.graph.text import parse_joint, print_joint
from remat.planning.planner import Planner
from remat.planning.request import CostOption, OffloadOption, PlanRequest
from remat.planning.without import Without
from remat.plugins.registry import registry
from remat.report.before_after import BeforeAfter
from remat.running.jobs import AnyExecutor, name_to_send, run_jobs
from remat.solvers.base import Solver
from remat.units import (
    AnyBudget,
    Budget,
    Peak,
    Saved,
    format_bytes,
    format_change,
    format_cost,
    format_share,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One solver at one budget; figures are None where it failed, and ``reason`` says why.

    Attributes:
        solver: name of the solver that was asked.
        budget: the budget as it was asked for.
        decided_by: what decided: the solver; of ``auto``, also the cut of the pass ``min-cut``.
        capacity: the bytes that the plan was allowed to save.
        saved_bytes: bytes saved.
        recompute_cost: cost of recomputing, and exposed transfer time, in ``unit``.
        recompute_bound: proven lower bound on it within ``capacity``.
        peak_bytes: simulated peak of the step.
        solve_s: seconds that the solver took to decide this plan.
        plan_s: seconds from prepared graph to finished plan.
        unit: unit of the costs.
        best: whether no other solver has a lower cost at this budget, or the same one with fewer
            bytes saved.
        more: share by which the modelled step costs more than without remat; None without a plan, and
            where the cost of the step is not known.
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
    more: float | None = None
    reason: str | None = None

    @property
    def label(self) -> str:
        """The budget for people."""
        return Budget.parse(self.budget).label

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
        unit: unit of all costs.
        step_cost: cost of running every operator of the step once; 0 where it is not known.
        without_peak_bytes: simulated peak of the step without remat, which is that of the plan of ``auto``
            at budget 1.
        without_recompute_cost: cost of what runs twice in that plan.
        brief: names of solvers that were given a small part of their work, see `remat.solvers.brief`.
    """

    graph: str
    cost: str
    rows: tuple[ComparisonRow, ...]
    unit: str = ""
    step_cost: int = 0
    without_peak_bytes: int = 0
    without_recompute_cost: int = 0
    brief: tuple[str, ...] = ()

    @property
    def without(self) -> str:
        """The step without remat in one line; empty where it is not known."""
        if not self.without_peak_bytes or not self.step_cost:
            return ""
        step = format_cost(self.step_cost + self.without_recompute_cost, self.unit)
        return f"without remat: peak {format_bytes(self.without_peak_bytes)}, step {step} modelled"

    def to_json(self) -> str:
        figures = {f.name: getattr(self, f.name) for f in fields(self)}
        rows = [asdict(r) | {"gap": r.gap} for r in self.rows]
        return json.dumps(figures | {"rows": rows}, indent=2) + "\n"

    def __str__(self) -> str:
        wide = max([len("solver"), *(len(r.solver) for r in self.rows)])
        head = f"{'saved':>9} {'recompute':>11}   {'gap':>7} {'peak':>9} {'step':>7} {'time':>9}"
        lines = [
            *([self.without] if self.without else []),
            f"{'budget':>13} {'solver':{wide}} {head}",
        ]
        for r in self.rows:
            name = f"{r.label:>13} {r.solver:{wide}}"
            if r.saved_bytes is None or r.recompute_cost is None:
                lines.append(f"{name} {r.reason}")
                continue
            lines.append(
                f"{name} {format_bytes(r.saved_bytes):>9} "
                f"{format_cost(r.recompute_cost, r.unit or ''):>11} {'*' if r.best else ' '} "
                f"{format_share(r.gap):>7} {format_bytes(r.peak_bytes or 0):>9} {format_change(r.more):>7} "
                f"{r.solve_s or 0:>7.2f} s"
            )
        return "\n".join(lines)


#: Figures of a row that are those of its plan.
_OF_PLAN = (
    "capacity", "saved_bytes", "recompute_bound", "peak_bytes", "solve_s", "unit",
)  # fmt: skip


def compare(
    joint: JointGraph,
    solvers: str | Solver | Iterable[str | Solver] | None = None,
    budgets: AnyBudget | Sequence[AnyBudget] = (0.2, 0.5, 0.8),
    cost: CostOption = COST,
    time_limit: float | None = None,
    *,
    reread_inputs: bool = True,
    offload: OffloadOption = None,
    executor: AnyExecutor = None,
    on_row: Callable[[ComparisonRow], None] | None = None,
) -> Comparison:
    """Plans one joint graph with several solvers at several budgets.

    A solver that cannot run, refuses, or answers wrongly gets a row with the reason; the others go
    on. Foreign solvers run in processes of their own, so that not even a crash takes the others
    down. An unknown name and a budget that cannot be read are errors at once.

    Args:
        joint: the captured step; it is not changed.
        solvers: names or instances, or one of them; all that can be used here where None.
        budgets: budgets as `plan` reads them, or one.
        cost: cost model, shared by all.
        time_limit: seconds for each solver on each problem; None: no clock.
        reread_inputs: as in `plan`.
        offload: as in `plan`, for all, whose budgets are then peaks.
        executor: what plans: any `concurrent.futures.Executor`, a number of processes, or None for this process.
            With one, solvers and the cost model are given by name.
        on_row: called with each row as it is known, ``best`` not yet set.

    Raises:
        ProblemError: an argument is not what it must be, or a list is empty.
        SolverError: a solver is unknown.
    """
    known = registry()
    names = (
        list(known.solver_names())
        if solvers is None
        else as_list("solvers", solvers, (str, Solver))
    )
    requests = [
        PlanRequest.of(
            budget=b,
            cost=cost,
            time_limit=time_limit,
            reread_inputs=reread_inputs,
            offload=offload,
        )
        for b in as_list("budgets", budgets, (str, int, float, Fraction, Budget, Peak, Saved))
    ]
    for name in names:
        if isinstance(name, str):
            known.solver_class(name)
    prepared = Planner.of(joint, requests[0])
    requests = [request.on(joint) for request in requests]
    if executor is not None:
        elsewhere = [
            _Elsewhere(
                joint=print_joint(joint),
                solver=name_to_send(name, "solver"),
                budget=str(request.budget),
                cost=name_to_send(value_of(cost), "cost model"),
                time_limit=time_limit,
                reread_inputs=reread_inputs,
                offload=None if request.offload is None else str(request.offload),
            )
            for request in requests
            for name in names
        ]
        return _compared(joint, prepared, requests[0], _asked_of(executor, elsewhere, on_row))
    without, step_costs = prepared.without, prepared.step_costs
    rows: list[ComparisonRow] = []
    ready: dict[str, Solver] = {}
    for request in requests:
        # One limit for all solvers, whatever the least peak that each of them finds.
        limit = prepared.limit_of(request.budget)
        for name in names:
            label = name if isinstance(name, str) else name.name
            budget, start = str(request.budget), time.perf_counter()
            try:
                if label not in ready:
                    ready[label] = request.by(name, isolation="foreign").solver
                planner = Planner(
                    prepared.state, request.by(ready[label]), fingerprint=prepared.fingerprint
                )
                # One step without remat for all rows, so that none pays for it.
                planner.without, planner.step_costs = without, step_costs
                decided = planner.decide(limit)
                p = planner.finish(decided, request.budget)
            except RematError as error:
                rows.append(ComparisonRow(solver=label, budget=budget, reason=str(error)))
            else:
                rows.append(
                    ComparisonRow(
                        solver=label,
                        budget=budget,
                        decided_by=p.solver,
                        plan_s=time.perf_counter() - start,
                        recompute_cost=p.recompute_cost + p.exposed_time,
                        **{name: getattr(p, name) for name in _OF_PLAN},
                    )
                )
            if on_row is not None:
                on_row(rows[-1])
    return _compared(joint, prepared, requests[0], rows)


def _compared(
    joint: JointGraph, prepared: Planner, request: PlanRequest, rows: Sequence[ComparisonRow]
) -> Comparison:
    without, step_cost = prepared.without, prepared.step_cost
    rows = [_beside(r, step_cost, without) for r in rows]
    return Comparison(
        graph=joint.name,
        cost=str(request.cost),
        rows=mark_best(rows),
        unit=request.cost.unit,
        step_cost=step_cost,
        without_peak_bytes=without.peak_bytes,
        without_recompute_cost=without.recompute_cost,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elsewhere:
    """One row, to be planned by a worker."""

    joint: str
    solver: str
    budget: str
    cost: str
    time_limit: float | None
    reread_inputs: bool
    offload: str | None


def _asked_of(
    executor: AnyExecutor,
    asked: Sequence[_Elsewhere],
    on_row: Callable[[ComparisonRow], None] | None,
) -> list[ComparisonRow]:
    """The rows that workers plan, in the order in which they are asked for."""
    found: dict[int, ComparisonRow] = {}

    def note(k: int, row: ComparisonRow) -> None:
        found[k] = row
        if on_row is not None:
            on_row(row)

    def died(k: int, why: str) -> None:
        note(k, ComparisonRow(solver=asked[k].solver, budget=asked[k].budget, reason=why))

    run_jobs(_planned_elsewhere, asked, executor, note, died)
    return [found[k] for k in range(len(asked))]


def _planned_elsewhere(asked: _Elsewhere) -> ComparisonRow:
    (row,) = compare(
        parse_joint(asked.joint),
        (asked.solver,),
        (asked.budget,),
        asked.cost,
        asked.time_limit,
        reread_inputs=asked.reread_inputs,
        offload=asked.offload,
    ).rows
    return row


def _beside(row: ComparisonRow, step_cost: int, without: Without) -> ComparisonRow:
    """A row beside the step without remat."""
    if row.recompute_cost is None:
        return row
    figures = BeforeAfter(
        peak_bytes=row.peak_bytes or 0,
        without_peak_bytes=without.peak_bytes,
        step_cost=step_cost,
        recompute_cost=row.recompute_cost,
        without_recompute_cost=without.recompute_cost,
        unit=row.unit or "",
    )
    return replace(row, more=figures.more)


def mark_best(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    least: dict[str, tuple[int, int]] = {}
    for r in rows:
        if r.recompute_cost is not None and r.saved_bytes is not None:
            key = (r.recompute_cost, r.saved_bytes)
            least[r.budget] = min(key, least.get(r.budget, key))
    return tuple(
        replace(r, best=(r.recompute_cost, r.saved_bytes) == least.get(r.budget)) for r in rows
    )
