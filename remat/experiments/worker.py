"""Plan one model by one solver, as one job of a table, in this process or in a worker of an executor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from remat.errors import RematError
from remat.experiments.table import ExperimentRow
from remat.graph.capture.step import capture
from remat.graph.joint import JointGraph
from remat.graph.text import parse_joint
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search.candidates import Candidate
from remat.planning.search.proposals import search_of
from remat.solvers.base import Solver
from remat.units import Budget

#: Columns of a row that are copied from the fields of its plan.
_OF_PLAN = ("capacity", "saved_bytes", "recompute_bound", "peak_bytes", "solve_s", "unit")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """Task to plan one model under one cost model, by one solver, at one budget or at several budgets on the peak.

    Attributes:
        table: random token of the call of `compare` or `sweep` that the job belongs to.
        model: name of the model.
        of: text that identifies the planned step, for the column ``of`` of the job's rows.
        source: a captured step, its text, or a function that returns (model, args, kwargs).
        lower: the lowering for the model, if ``source`` is a function.
        solver: the solver, by name or as an instance.
        options: cost model and the other arguments of `PlanRequest.of`, without solver and budget.
        budgets: the budgets, as text.
    """

    table: str
    model: str = ""
    of: str = ""
    source: JointGraph | str | Callable[[], Any]
    lower: str = ""
    solver: str | Solver
    options: Mapping[str, Any]
    budgets: tuple[str, ...]

    @property
    def group(self) -> tuple[str, Any]:
        """The pair (model, cost model) of the job; a table lists rows with equal pairs together."""
        return self.model, self.options["cost"]

    def row(self, budget: str, **figures: Any) -> ExperimentRow:
        """Return the job's table row for a budget, with figures of the plan, or with ``reason`` if there is no plan."""
        return ExperimentRow(
            model=self.model,
            of=self.of,
            cost=str(self.options["cost"]),
            solver=self.solver if isinstance(self.solver, str) else self.solver.name,
            budget=budget,
            **figures,
        )

    def failed(self, reason: str) -> list[ExperimentRow]:
        """Return the table rows of a job whose planning failed, one row for each budget, all with the same reason."""
        return [self.row(budget, reason=reason) for budget in self.budgets]


def rows_of(prepared: Planner, job: Job) -> list[ExperimentRow]:
    """Plan a job at each of its budgets, and return one table row for each budget.

    At each budget on the peak, candidates that were found for smaller budgets may be chosen, too.

    Args:
        prepared: the planner of the job's step, which has the figures of the step without remat.
        job: the job.
    """
    context, baseline = prepared.context, prepared.baseline
    priced = bool(context.step_cost and baseline.peak_bytes)
    shared: dict[str, Any] = {
        "priced": str(context.request.cost),
        "without_peak_bytes": baseline.peak_bytes if priced else None,
        "without_step_cost": baseline.cost if priced else None,
    }
    budgets = {text: Budget.parse(text) for text in job.budgets}
    request = context.request.by(job.solver, isolation="foreign")
    request = replace(request, budget=budgets[job.budgets[0]])
    # All rows share the figures of the step without remat, so that no row's time includes computing them.
    planner = Planner(search_of(context.with_request(request)), baseline=baseline)
    # A ratio of the peak depends on the least peak that a solver finds. So the ratio is converted to bytes once,
    # and all solvers get the same limit.
    limits = {
        text: Budget(peak_bytes=prepared.limit_of(budget)) if budget.on_peak else budget
        for text, budget in budgets.items()
    }
    candidates: dict[str, Candidate] = {}
    seconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for text in sorted(limits, key=lambda text: limits[text].peak_bytes or 0):
        start = time.perf_counter()
        try:
            candidates[text] = planner.decide(limits[text])
        except RematError as error:
            reasons[text] = str(error)
        seconds[text] = time.perf_counter() - start
    if len(candidates) > 1:
        peaks = {text: limits[text].peak_bytes or 0 for text in candidates}
        by_peak = planner.search.choose_again({peaks[t]: c for t, c in candidates.items()})
        candidates = {text: by_peak[peak] for text, peak in peaks.items()}
    rows = []
    for text, budget in budgets.items():
        start = time.perf_counter()
        try:
            if text in candidates:
                plan = planner.finish(candidates[text], budget, peak_limit=0)
        except RematError as error:
            reasons[text] = str(error)
        if text in reasons:
            rows.append(job.row(text, **shared, reason=reasons[text]))
            continue
        figures = {
            **{name: getattr(plan, name) for name in _OF_PLAN},
            "decided_by": plan.solver,
            "recompute_cost": plan.recompute_cost + plan.exposed_time,
            "plan_s": seconds[text] + time.perf_counter() - start,
            "more": plan.before_after.more,
        }
        rows.append(job.row(text, **shared, **figures))
    return rows


@dataclass(slots=True)
class CapturedStep:
    """A captured step of one table, with a dict from the name of a cost model to the step's planner under this model."""

    table: str
    model: str
    joint: JointGraph
    planners: dict[str, Planner] = field(default_factory=dict)


class _Newest(threading.local):
    """Cache of the step that this thread captured last."""

    step: CapturedStep | None = None


_NEWEST = _Newest()


def cache_step(step: CapturedStep | None) -> None:
    """Cache a captured step, which this thread reuses for later jobs of the same table and model."""
    _NEWEST.step = step


def answer(job: Job) -> list[ExperimentRow]:
    """Plan a job, and return its table rows; if planning fails, ``reason`` in each row is the error's message."""
    try:
        return rows_of(_prepared(job), job)
    except (Exception, SystemExit) as error:  # an error of the user's code concerns this job only
        reason = str(error) if isinstance(error, RematError) else f"{type(error).__name__}: {error}"
        return job.failed(reason)


def _prepared(job: Job) -> Planner:
    """Return the planner of a job's step, from this thread's cache if the cache has this step."""
    step, cost = _NEWEST.step, str(job.options["cost"])
    if step is None or (step.table, step.model) != (job.table, job.model):
        cache_step(None)  # the cache stays empty if capturing fails
        step = CapturedStep(job.table, job.model, _captured(job))
        cache_step(step)
    if cost not in step.planners:
        request = PlanRequest.of(**{**job.options, "budget": job.budgets[0]})
        step.planners[cost] = Planner.of(step.joint, request)
    return step.planners[cost]


def _captured(job: Job) -> JointGraph:
    """Return the joint graph of a job: as given, parsed from text, or captured from the function's model."""
    source = job.source
    if isinstance(source, str):
        return parse_joint(source)
    if isinstance(source, JointGraph):
        return source
    model, args, kwargs = source()
    return capture(model, tuple(args), dict(kwargs), lower=job.lower)
