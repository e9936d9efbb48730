"""Plan all combinations of models, cost models, budgets and solvers, and tabulate the results.

`remat.compare` plans one step with several solvers, and `remat.sweep` plans several models. One job plans one model
with one cost model and one solver, at one budget or at all budgets on the peak. Any `concurrent.futures.Executor` can
run a job.
"""

from __future__ import annotations

import pickle
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from remat.arguments import COST, as_list, passes_on
from remat.errors import ProblemError
from remat.experiments.journal import Journal, journal_of, opened
from remat.experiments.table import (
    Comparison,
    ExperimentRow,
    Sweep,
    checked_path,
    mark_best,
)
from remat.experiments.worker import CapturedStep, Job, answer, cache_step
from remat.graph.joint import JointGraph
from remat.graph.text import print_joint
from remat.options import CostOption, PlanOptions, StepOptions
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.plugins.registry import registry
from remat.running.jobs import AnyExecutor, check_executor, name_to_send, run_jobs
from remat.solvers.base import Solver
from remat.units import AnyBudget, Budget, Peak, Saved

#: A model to plan: a captured step, or a function that returns (model, args, kwargs), as for the command `remat plan`.
Model = JointGraph | Callable[[], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]


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
    continue. A solver that is not part of remat runs in a process of its own, so that a crash ends only that process.
    An unknown solver and an invalid budget raise an error before any planning.

    Args:
        joint: the captured step; it is not changed.
        solvers: one solver or several, by name or as instances; None: all solvers that can run here.
        budgets: one budget or several, as in `remat.plan`.
        cost: cost model for all solvers.
        time_limit: seconds for each call of a solver; None: no limit.
        executor: where to plan: any `concurrent.futures.Executor`, a number of processes, or None for this
            process. With an executor, give solvers and the cost model by name.
        on_row: called with each row as soon as its job has ended. The row's field ``best`` is not set yet.
        options: options of `remat.options.PlanOptions` for the values of the step, for all solvers, but ``chunk`` is
            not ``"auto"``. With ``offload``, all budgets must be budgets on the peak, unless values are tagged for
            offloading.

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
    texts = _budgets(budgets)
    requests = [PlanRequest.of(budget=budget, **common) for budget in texts]
    requests[0].check("no choice of chunks", "compare")
    _check_solvers(names)
    planner = Planner.of(joint, requests[0])
    if not planner.context.tagged:
        for request in requests:
            request.check("nothing tagged")
    source: JointGraph | str = joint
    if executor is not None:
        source = print_joint(joint, modules=True)
        names = [name_to_send(name, "solver") for name in names]
        common = requests[0].to_options() | {"cost": name_to_send(cost, "cost model")}
    token = uuid.uuid4().hex
    jobs = [
        Job(table=token, source=source, solver=name, options=common, budgets=ladder)
        for ladder in _ladders(texts)
        for name in names
    ]
    # Without an executor, the jobs run in this thread, and reuse the step that was prepared above.
    cache_step(CapturedStep(token, "", joint, {str(common["cost"]): planner}))
    return Comparison(
        graph=joint.name,
        cost=str(planner.context.request.cost),
        rows=_plan_all(jobs, texts, Journal(), executor, on_row),
        unit=planner.context.request.cost.unit,
        step_cost=planner.context.step_cost,
        without_peak_bytes=planner.baseline.peak_bytes,
        without_cost=planner.baseline.cost,
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

    If planning fails for a combination of model, budget, solver and cost model, the combination's row has the reason.

    Budgets on the peak are planned together, so that a plan for a larger budget never costs more than one for a smaller
    budget. Rows from earlier calls are not planned again.

    With ``output``, each row is appended to a file in JSON Lines as soon as its job has ended. If ``output`` ends in
    ``.jsonl``, rows are appended to ``output`` itself. For other formats, rows go to a file beside ``output``, and
    ``output`` is written at the end. Another call with the same ``output``, after a crash or with more budgets, reuses
    the rows in the file. A file that another version of remat or PyTorch wrote is refused. A captured step is
    identified by its graph, but a function only by its name: give another ``output`` after changing the function.

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
        output: file of the table, which ends in ``.jsonl``, ``.json`` or ``.csv``.
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
    names = list(dict.fromkeys(as_list("solvers", solvers, (str,))))
    cost_names = list(dict.fromkeys(as_list("costs", costs, (str,))))
    texts = _budgets(budgets)
    _check_solvers(names)
    # Check the options here. In a worker, the error for an invalid option would become the reason of every row.
    for cost in cost_names:
        PlanRequest.of(cost=cost, time_limit=time_limit)
    path = None if output is None else checked_path(output)
    sources = {name: _source(name, model, executor) for name, model in models.items()}
    token = uuid.uuid4().hex
    jobs = [
        Job(
            table=token,
            model=name,
            of=_of(models[name], lower, time_limit),
            source=source,
            lower=lower,
            solver=solver,
            options={"cost": cost, "time_limit": time_limit},
            budgets=ladder,
        )
        for name, source in sources.items()
        for cost in cost_names
        for ladder in _ladders(texts)
        for solver in names
    ]
    with opened(path) as journal:
        rows = _plan_all(jobs, texts, journal, executor, on_row, on_start)
        if path is not None:
            keys = {row.key for row in rows}
            others = (row for key, row in journal.rows.items() if key not in keys)
            table = Sweep(rows=(*rows, *others))  # rows of earlier calls stay in the file
            for file in dict.fromkeys((journal_of(path), path)):
                table.save(file)
    return Sweep(rows=rows)


def _plan_all(
    jobs: Sequence[Job],
    order: Sequence[str],
    journal: Journal,
    executor: AnyExecutor,
    on_row: Callable[[ExperimentRow], None] | None,
    on_start: Callable[[Mapping[str, int]], None] | None = None,
) -> tuple[ExperimentRow, ...]:
    """Plan the jobs without finished rows in ``journal``; return all rows.

    Rows are ordered by model, cost model, budget and solver, with budgets in the order of ``order``.
    """
    # By position of the job and by budget, because two instances of a solver may have one name.
    earlier = journal.rows
    rows = {
        (k, budget): earlier[key]
        for k, job in enumerate(jobs)
        for budget in job.budgets
        if (key := job.row(budget).key) in earlier
    }
    missing = [
        (k, replace(job, budgets=budgets))
        for k, job in enumerate(jobs)
        if (budgets := tuple(b for b in job.budgets if (k, b) not in rows))
    ]
    pending = [job for _, job in missing]
    if on_start is not None:
        on_start(Counter(job.model for job in pending for _ in job.budgets))

    def add(at: int, answers: list[ExperimentRow]) -> None:
        for row in answers:
            journal.add(row)
            rows[missing[at][0], row.budget] = row
            if on_row is not None:
                on_row(row)

    try:
        run_jobs(answer, pending, executor, add, lambda at, why: add(at, pending[at].failed(why)))
    finally:
        # The cache is emptied: otherwise the captured graph would stay in memory until this thread ends.
        cache_step(None)
    groups = [*dict.fromkeys(job.group for job in jobs)]

    def place(at: tuple[int, str]) -> tuple[int, int, int]:
        return groups.index(jobs[at[0]].group), order.index(at[1]), at[0]

    return tuple(mark_best(rows[at] for at in sorted(rows, key=place)))


def _budgets(budgets: AnyBudget | Sequence[AnyBudget]) -> list[str]:
    """Check budgets, and return them as texts that `Budget.parse` reads, without duplicates."""
    given = as_list("budgets", budgets, (str, int, float, Fraction, Budget, Peak, Saved))
    return list(dict.fromkeys(str(Budget.parse(budget)) for budget in given))


def _ladders(budgets: Iterable[str]) -> list[tuple[str, ...]]:
    """Group budgets by job: one job plans all budgets on the peak, and each other budget has a job of its own."""
    peaks, alone = [], []
    for budget in budgets:
        if Budget.parse(budget).on_peak:
            peaks.append(budget)
        else:
            alone.append((budget,))
    return [*([tuple(peaks)] if peaks else []), *alone]


def _check_solvers(names: Iterable[str | Solver]) -> None:
    """Raise a SolverError if a given name is not the name of a solver; solver instances are not checked."""
    for name in names:
        if isinstance(name, str):
            registry().solver_class(name)


def _of(model: Model, lower: str, time_limit: float | None) -> str:
    """Return the text that identifies a model's step; a resumed sweep reuses a row only if this text is equal."""
    if isinstance(model, JointGraph):
        identity = model.fingerprint[:16]
    else:
        # The address is removed from the model's text, because the address differs from process to process.
        name = getattr(model, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(model))
        identity = f"{name} for {lower}"
    return identity if time_limit is None else f"{identity}, at most {time_limit:g} s"


def _source(name: str, model: Any, executor: AnyExecutor) -> JointGraph | str | Callable[[], Any]:
    """Return what a job stores of a model: a function, or a captured step (as text if an executor runs the job)."""
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
