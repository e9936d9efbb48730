"""Plan all combinations of models, cost models, budgets and solvers, and tabulate the results.

`remat.compare` plans one step with several solvers, and `remat.sweep` plans several models. Each row of the table is
one job, which plans one combination. Any executor can run a job.
"""

from __future__ import annotations

import pickle
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from remat.arguments import COST, as_list, passes_on
from remat.errors import ProblemError, RematError
from remat.experiments.journal import opened
from remat.experiments.table import (
    Comparison,
    ExperimentRow,
    Sweep,
    checked_path,
    mark_best,
)
from remat.graph.capture.step import capture
from remat.graph.joint import JointGraph
from remat.graph.text import parse_joint, print_joint
from remat.options import CostOption, PlanOptions, StepOptions
from remat.planning.context import GraphContext
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search.candidates import Candidate
from remat.planning.search.proposals import search_of
from remat.plugins.registry import registry
from remat.running.jobs import AnyExecutor, check_executor, name_to_send, run_jobs
from remat.solvers.base import Solver
from remat.units import AnyBudget, Budget, Peak, Saved

#: A model to plan: a captured step, or a function that returns (model, args, kwargs), as for the command `remat plan`.
Model = JointGraph | Callable[[], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]
#: Columns of a row that are copied from the fields of its plan.
_OF_PLAN = ("capacity", "saved_bytes", "recompute_bound", "peak_bytes", "solve_s", "unit")


@passes_on(StepOptions.__annotations__, PlanOptions)
def compare(
    joint: JointGraph,
    solvers: str | Solver | Iterable[str | Solver] | None = None,
    budgets: AnyBudget | Sequence[AnyBudget] = (0.2, 0.5, 0.8),
    cost: CostOption = COST,
    time_limit: float | None = None,
    *,
    executor: AnyExecutor = None,
    on_row: Callable[[ExperimentRow], None] | None = None,
    **options: Unpack[StepOptions],
) -> Comparison:
    """Plan one joint graph with several solvers at several budgets.

    A solver that cannot run, refuses the problem, or answers wrongly gets a row with the reason, and the other solvers
    continue. Each solver that is not part of remat runs in a process of its own, which alone ends if the solver
    crashes. An unknown solver and an invalid budget raise an error before any planning.

    Args:
        joint: the captured step; it is not changed.
        solvers: one solver or several, by name or as instances; None: all solvers that can run here.
        budgets: one budget or several, as in `remat.plan`.
        cost: cost model for all solvers.
        time_limit: seconds for each call of a solver; None: no limit.
        executor: where to plan: any `concurrent.futures.Executor`, a number of processes, or None for this
            process. With an executor, give solvers and the cost model by name.
        on_row: called with each row as soon as its job has ended. The row's field ``best`` is not set yet.
        options: options of `remat.options.PlanOptions` for the values of the step, for all solvers, but
            ``chunk`` is not ``"auto"``. Beside ``offload``, the budgets must be budgets on the peak, unless values are
            tagged for offloading.

    Returns:
        A table with one row for each budget and solver.

    Raises:
        ProblemError: an argument is invalid, or a list is empty.
        SolverError: a solver is unknown.
    """
    check_executor(executor)
    names = registry().solver_names() if solvers is None else solvers
    names = as_list("solvers", names, (str, Solver))
    common: dict[str, Any] = {"cost": cost, "time_limit": time_limit, **options}
    read = list(dict.fromkeys(_budgets(budgets)))
    requests = [PlanRequest.of(budget=budget, **common) for budget in read]
    requests[0].check("no choice of chunks", "compare")
    _check_solvers(names)
    prepared = _Prepared(joint, requests[0])
    if not prepared.planner.context.tagged:
        for request in requests:
            request.check("nothing tagged")
    source: JointGraph | str = joint
    if executor is not None:
        source = print_joint(joint, modules=True)
        names = [name_to_send(name, "solver") for name in names]
        name = name_to_send(common["cost"], "cost model")
        common = requests[0].to_options() | {"cost": name}
    token = uuid.uuid4().hex
    questions = [
        _Question(sweep=token, source=source, solver=name, options=common, budgets=ladder)
        for ladder in _ladders(read)
        for name in names
    ]
    # Without an executor, the jobs run in this thread, and reuse the step that was prepared above.
    _NEWEST.step = (token, ""), joint, {str(common["cost"]): prepared}
    made = _ask(questions, executor, on_row or (lambda _: None))
    rank = {budget: k for k, budget in enumerate(read)}
    rows = sorted(made, key=lambda row: rank[row.budget])
    planner = prepared.planner
    return Comparison(
        graph=joint.name,
        cost=str(planner.context.request.cost),
        rows=tuple(mark_best(rows)),
        unit=planner.context.request.cost.unit,
        step_cost=planner.context.step_cost,
        without_peak_bytes=planner.baseline.peak_bytes,
        without_recompute_cost=planner.baseline.recompute_cost,
    )


def sweep(
    models: Mapping[str, Model],
    *,
    budgets: AnyBudget | Sequence[AnyBudget] = (0.2, 0.5, 0.8),
    solvers: str | Iterable[str] = ("auto",),
    costs: str | Iterable[str] = ("auto",),
    time_limit: float | None = None,
    lower: str = "inductor",
    executor: AnyExecutor = None,
    output: str | Path | None = None,
    on_start: Callable[[Mapping[str, int]], None] | None = None,
    on_row: Callable[[ExperimentRow], None] | None = None,
) -> Sweep:
    """Plan every model at every budget with every solver under every cost model.

    A combination that fails gets a row with the reason.

    Budgets on the peak are planned together, so that no larger one costs more. Rows of earlier calls stay as they are.

    With ``output``, each row is written to ``OUTPUT.partial`` as soon as its job has ended. Another call with the same
    output, after a crash or with more budgets, reuses the rows of that file and of ``OUTPUT``. Files of another format
    version are refused, and so is an ``OUTPUT.partial`` that another version of remat or PyTorch wrote. A captured step
    is identified by its graph, but a function only by its name. So give another output after changing the function.

    Args:
        models: captured steps, or functions that return (model, args, kwargs), by name. With an executor,
            functions are pickled, so they must be importable from a module.
        budgets: as in `remat.compare`.
        solvers: names of solvers.
        costs: names of cost models.
        time_limit: seconds for each call of a solver; None: no limit.
        lower: the lowering, as in `remat.capture`, for models that functions return.
        executor: where to plan: any `concurrent.futures.Executor` (of Dask: ``client.get_executor()``), a
            number of processes, or None for this process.
        output: file of the table, which ends in ``.json``, ``.csv`` or ``.parquet``.
        on_start: called once, before planning, with a dict from the name of each model to its number of rows to plan.
            The dict leaves out models whose rows are all in ``output``.
        on_row: called with each new row as soon as its job has ended.

    Returns:
        The table of the requested rows.

    Raises:
        ProblemError: an argument is invalid, a file is of another version, or the executor's workers have died or
            cannot import remat.
        SolverError: a solver is unknown.
    """
    check_executor(executor)
    if not isinstance(models, Mapping) or not models:
        raise ProblemError(
            f"models is {models!r}; expected a dict of captured steps or functions by name, with at least one"
        )
    names = as_list("solvers", solvers, (str,))
    priced = as_list("costs", costs, (str,))
    read = _budgets(budgets)
    _check_solvers(names)
    # Check the options here. In a worker, the error for an invalid option would become the reason of every row.
    for cost in priced:
        PlanRequest.of(cost=cost, time_limit=time_limit)
    token = uuid.uuid4().hex
    wanted = [
        _Question(
            sweep=token,
            model=name,
            of=_of(models[name], lower, time_limit),
            source=source,
            lower=lower,
            solver=solver,
            options={"cost": cost, "time_limit": time_limit},
            budgets=ladder,
        )
        for name, source in [(n, _source(n, m, executor)) for n, m in models.items()]
        for cost in dict.fromkeys(priced)
        for ladder in _ladders(dict.fromkeys(read))
        for solver in dict.fromkeys(names)
    ]
    path = None if output is None else checked_path(output)
    with opened(path) as journal:
        groups = [*dict.fromkeys(map(_group, wanted))]
        missing = {
            q: tuple(b for b in q.budgets if q.row(b).key not in journal.known) for q in wanted
        }
        asked = [replace(q, budgets=budgets) for q, budgets in missing.items() if budgets]
        if on_start is not None:
            on_start(Counter(q.model for q in asked for _ in q.budgets))

        def note(row: ExperimentRow) -> None:
            journal.add(row)
            if on_row is not None:
                on_row(row)

        _ask(asked, executor, note)
        # By model and cost model, then by budget in the given order, then by solver.
        pairs = sorted(
            ((q, budget) for q in wanted for budget in q.budgets),
            key=lambda pair: (groups.index(_group(pair[0])), read.index(pair[1])),
        )
        keys = [q.row(budget).key for q, budget in pairs]
        others = [row for key, row in journal.known.items() if key not in set(keys)]
        found = Sweep(rows=tuple(mark_best(journal.known[key] for key in keys)))
        if path is not None:  # rows of earlier calls stay in the file
            Sweep(rows=(*found.rows, *others)).save(path)
    return found


def _budgets(budgets: AnyBudget | Sequence[AnyBudget]) -> list[str]:
    """Check budgets, and return them as text that `Budget.parse` reads."""
    given = as_list("budgets", budgets, (str, int, float, Fraction, Budget, Peak, Saved))
    return [str(Budget.parse(budget)) for budget in given]


def _ladders(budgets: Iterable[str]) -> list[tuple[str, ...]]:
    """Group budgets into those that one job plans: all budgets on the peak together, and each other one alone."""
    peaks, alone = [], []
    for budget in budgets:
        if Budget.parse(budget).on_peak:
            peaks.append(budget)
        else:
            alone.append((budget,))
    return [*([tuple(peaks)] if peaks else []), *alone]


def _group(question: _Question) -> tuple[str, Any]:
    """Return model and cost model of a job, whose rows stand together in a table."""
    return question.model, question.options["cost"]


def _check_solvers(names: Iterable[str | Solver]) -> None:
    """Raise a SolverError if no solver has one of the given names; solver instances are not checked."""
    for name in names:
        if isinstance(name, str):
            registry().solver_class(name)


def _of(model: Model, lower: str, time_limit: float | None) -> str:
    """Return the text for the column ``of``, which identifies the planned step.

    A resumed sweep reuses a row only if this text is equal. For a captured step, the text is the start of the joint
    graph's fingerprint. For a function, it is the names of the function and of the lowering. The time limit in seconds
    follows, if there is one.
    """
    if isinstance(model, JointGraph):
        identity = model.fingerprint[:16]
    else:
        # The address is removed from the text, because it differs from process to process.
        name = getattr(model, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(model))
        identity = f"{name} for {lower}"
    return identity if time_limit is None else f"{identity}, at most {time_limit:g} s"


def _source(name: str, model: Any, executor: AnyExecutor) -> JointGraph | str | Callable[[], Any]:
    """Return a model in the form that a worker receives.

    Args:
        name: name of the model, for messages.
        model: a captured step, or a function that returns (model, args, kwargs).
        executor: where the worker runs; None for this process.

    Returns:
        A function is returned unchanged. A captured step is returned as text if there is an executor, and unchanged
        otherwise.

    Raises:
        ProblemError: the model is neither a joint graph nor a function, or a function cannot be pickled
            for the executor.
    """
    if isinstance(model, JointGraph):
        return model if executor is None else print_joint(model)
    if not callable(model) or isinstance(model, nn.Module):
        raise ProblemError(
            f"model '{name}' is a {type(model).__name__}; expected what remat.capture returns, or a function that "
            "returns (model, args, kwargs)"
        )
    if executor is not None:
        try:
            pickle.dumps(model)
        except Exception as error:
            raise ProblemError(
                f"model '{name}' cannot be sent to the executor: {error}. Give a function of a module, or what "
                "remat.capture returns"
            ) from None
    return model  # type: ignore[no-any-return]


# One row, where it is answered ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Question:
    """One job: plan one model under one cost model, by one solver, at one budget or within several peaks.

    Attributes:
        sweep: random token of the call of `compare` or `sweep` that the job belongs to. A worker reuses a
            captured step only for jobs with the same token.
        model: name of the model.
        of: text for the column ``of`` of the row.
        source: a captured step, its text, or a function that returns (model, args, kwargs).
        lower: the lowering for the model, if ``source`` is a function.
        solver: the solver, by name or as an instance.
        options: cost model and the other arguments of `PlanRequest.of`, without solver and budget.
        budgets: the budgets, as text.
    """

    sweep: str
    model: str = ""
    of: str = ""
    source: JointGraph | str | Callable[[], Any]
    lower: str = ""
    solver: str | Solver
    options: Mapping[str, Any]
    budgets: tuple[str, ...]

    def row(self, budget: str, **figures: Any) -> ExperimentRow:
        """Build the row of a budget.

        Args:
            budget: the budget.
            figures: values of the columns that planning fills: the plan's figures, or ``reason`` if there is no plan.
        """
        return ExperimentRow(
            model=self.model,
            of=self.of,
            cost=str(self.options["cost"]),
            solver=self.solver if isinstance(self.solver, str) else self.solver.name,
            budget=budget,
            **figures,
        )

    def failed(self, reason: str) -> list[ExperimentRow]:
        """Build the rows of a job that failed."""
        return [self.row(budget, reason=reason) for budget in self.budgets]


class _Prepared:
    """One step under one cost model, prepared once for all budgets and solvers."""

    def __init__(self, joint: JointGraph, request: PlanRequest) -> None:
        self.planner = Planner.of(joint, request)
        self._requests: dict[str, PlanRequest] = {}

    def rows(self, question: _Question) -> list[ExperimentRow]:
        """Run a job; return a row for each budget, with the plan's figures, or ``reason`` without a plan.

        Budgets on the peak are a ladder: each larger one chooses among the candidates of the smaller ones, too.
        """
        planner = self.planner
        context, baseline = planner.context, planner.baseline
        step_cost = context.step_cost
        known = bool(step_cost and baseline.peak_bytes)
        figures: dict[str, Any] = {
            "priced": str(context.request.cost),
            "without_peak_bytes": baseline.peak_bytes if known else None,
            "without_step_cost": step_cost + baseline.recompute_cost if known else None,
        }
        request = replace(self._request(question.solver), budget=Budget.parse(question.budgets[0]))
        own = GraphContext(context.state, request, fingerprint=context.fingerprint)
        # All rows share the figures of the step without remat, so that no row's time includes computing them.
        alone = Planner(search_of(own), baseline=baseline)
        found: dict[str, Candidate] = {}
        took: dict[str, float] = {}
        failed: dict[str, str] = {}
        # A ratio of the peak depends on the least peak that a solver finds. So the ratio is converted to bytes once,
        # and all solvers get the same limit.
        asked = {text: Budget.parse(text) for text in question.budgets}
        limits = {
            text: Budget(peak_bytes=planner.limit_of(b)) if b.on_peak else b
            for text, b in asked.items()
        }
        for text in sorted(asked, key=lambda text: limits[text].peak_bytes or 0):
            start = time.perf_counter()
            try:
                found[text] = alone.decide(limits[text])
            except RematError as error:
                failed[text] = str(error)
            took[text] = time.perf_counter() - start
        if len(found) > 1:
            peaks = {text: limits[text].peak_bytes or 0 for text in found}
            chosen = alone.search.choose_again({peaks[text]: d for text, d in found.items()})
            found = {text: chosen[peak] for text, peak in peaks.items()}
        rows = []
        for text, budget in asked.items():
            start = time.perf_counter()
            try:
                plan = alone.finish(found[text], budget, peak_limit=0) if text in found else None
            except RematError as error:
                plan, failed[text] = None, str(error)
            if plan is None:
                rows.append(question.row(text, **figures, reason=failed[text]))
                continue
            made = {
                **{name: getattr(plan, name) for name in _OF_PLAN},
                "decided_by": plan.solver,
                "recompute_cost": plan.recompute_cost + plan.exposed_time,
                "plan_s": took[text] + time.perf_counter() - start,
                "more": plan.before_after.more,
            }
            rows.append(question.row(text, **figures, **made))
        return rows

    def _request(self, solver: str | Solver) -> PlanRequest:
        """Return the step's request with the given solver; each solver is created only once."""
        name = solver if isinstance(solver, str) else solver.name
        if name not in self._requests:
            self._requests[name] = self.planner.context.request.by(solver, isolation="foreign")
        return self._requests[name]


class _Newest(threading.local):
    """Cache of the step that this thread prepared last.

    Attributes:
        step: None if the cache is empty, else three items: the pair of `_Question.sweep` and name of the model; the
            captured step; and a dict from the requested name of a cost model to the step prepared under this model.
    """

    step: tuple[tuple[str, str], JointGraph, dict[str, _Prepared]] | None = None


_NEWEST = _Newest()


def _ask(
    questions: Sequence[_Question],
    executor: AnyExecutor,
    on_row: Callable[[ExperimentRow], None],
) -> list[ExperimentRow]:
    """Plan jobs on an executor; return their rows in the order of the jobs.

    Args:
        questions: the jobs.
        executor: where to plan, as in `compare`.
        on_row: called with each row as soon as its job has ended.
    """
    rows: dict[int, list[ExperimentRow]] = {}

    def note(k: int, made: list[ExperimentRow]) -> None:
        rows[k] = made
        for row in made:
            on_row(row)

    def died(k: int, why: str) -> None:
        note(k, questions[k].failed(why))

    try:
        run_jobs(answer, questions, executor, note, died)
    finally:
        # Otherwise the graph would stay in memory until this thread ends.
        _NEWEST.step = None
    return [row for k in range(len(questions)) for row in rows[k]]


def answer(question: _Question) -> list[ExperimentRow]:
    """Plan one job, and return the figures of its plans as rows.

    A worker of the executor runs this function. If planning fails, the row's ``reason`` is the
    error's message.
    """
    try:
        return _prepared(question).rows(question)
    except (Exception, SystemExit) as error:  # an error of the user's code concerns this job only
        reason = str(error) if isinstance(error, RematError) else f"{type(error).__name__}: {error}"
        return question.failed(reason)


def _prepared(question: _Question) -> _Prepared:
    """Return the prepared step of a job, from this thread's cache; else capture and prepare the step, and cache it."""
    of, cost = (question.sweep, question.model), str(question.options["cost"])
    if _NEWEST.step is None or _NEWEST.step[0] != of:
        _NEWEST.step = None  # stays empty if capturing fails
        _NEWEST.step = of, _captured(question), {}
    _, joint, prepared = _NEWEST.step
    if cost not in prepared:
        prepared[cost] = _Prepared(
            joint, PlanRequest.of(**{**question.options, "budget": question.budgets[0]})
        )
    return prepared[cost]


def _captured(question: _Question) -> JointGraph:
    """Return the joint graph of a job: as given, parsed from text, or captured from the function's model."""
    source = question.source
    if isinstance(source, str):
        return parse_joint(source)
    if isinstance(source, JointGraph):
        return source
    model, args, kwargs = source()
    return capture(model, tuple(args), dict(kwargs), lower=question.lower)
