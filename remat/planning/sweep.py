"""Many questions at once: models, budgets, solvers and cost models, answered anywhere, resumable, in one table."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

from remat.arguments import as_list
from remat.errors import ProblemError, RematError
from remat.files import write_whole
from remat.graph.capture import capture
from remat.graph.joint import JointGraph
from remat.graph.text import parse_joint, print_joint
from remat.planning.comparison import ComparisonRow, compare, mark_best
from remat.planning.request import PlanRequest
from remat.planning.sweep_table import COLUMNS, VERSION, Sweep, SweepRow, checked_path
from remat.running.jobs import AnyExecutor, check_executor, run_jobs
from remat.units import AnyBudget, Budget, Peak, Saved
from remat.version import __version__

#: What is planned: a captured step, or a function that returns (model, args, kwargs), as `remat plan` takes it.
Model = JointGraph | Callable[[], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What one job answers: one model under one cost model at one budget, by several solvers."""

    sweep: str  # which sweep asks: what it captures serves no other
    model: str
    of: str
    source: str | Callable[[], Any]  # text of a joint graph, or a function
    cost: str
    budget: str
    solvers: tuple[str, ...]
    time_limit: float | None
    lower: Any


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
    on_row: Callable[[SweepRow], None] | None = None,
) -> Sweep:
    """Plans every model at every budget with every solver under every cost model.

    With ``output`` each row is on disk as soon as it is known, in ``OUTPUT.partial``. Whoever asks again, after a crash
    or with more budgets, is answered from there and from ``OUTPUT`` itself; both are told apart from those of another
    version. A captured step is known by its graph, a function by its name: give another output after it was changed.
    What fails gets a row with the reason.

    Args:
        models: by name: captured steps, or functions that return (model, args, kwargs). For an executor a function
            is one of a module, as it is pickled.
        budgets: as in `remat.compare`.
        solvers: names of solvers.
        costs: names of cost models.
        time_limit: seconds for each solver on each problem; None: no clock.
        lower: the lowering for which functions are captured.
        executor: what answers: any `concurrent.futures.Executor` (of Dask: ``client.get_executor()``), a number of
            processes, or None for this process.
        output: the table: a file that ends in ``.json``, ``.csv`` or ``.parquet``.
        on_row: called with each row as it is known.

    Raises:
        ProblemError: an argument is not what it must be, a file is of another version, or the executor's workers
            are gone or lack remat.
        SolverError: a solver is unknown.
    """
    check_executor(executor)
    wanted = _questions(models, budgets, solvers, costs, time_limit, lower, executor)
    path = None if output is None else checked_path(output)
    order = [(q.model, q.cost, q.budget, solver, q.of) for q in wanted for solver in q.solvers]
    with contextlib.ExitStack() as stack:
        journal = _Journal(path)
        stack.push(journal.__exit__)  # even if it fails half way in
        journal.__enter__()
        known = journal.known
        asked = [
            _left(q, [s for s in q.solvers if (q.model, q.cost, q.budget, s, q.of) not in known])
            for q in wanted
        ]
        open_questions = [q for q in asked if q.solvers]

        def note(k: int, rows: Sequence[SweepRow]) -> None:
            for row in rows:
                journal.add(row)
                if on_row is not None:
                    on_row(row)

        def died(k: int, why: str) -> None:
            note(k, _without_answer(open_questions[k], why))

        try:
            run_jobs(answer, open_questions, executor, note, died)
        finally:
            _NEWEST.clear()
        found = Sweep(rows=tuple(_marked([known[key] for key in order])))
        others = [row for key, row in known.items() if key not in set(order)]
        if path is not None:  # what was known before is kept
            Sweep(rows=(*found.rows, *others)).save(path)
            journal.done()
    return found


def answer(question: _Question) -> list[SweepRow]:
    """The rows of one question; runs where the executor wants."""
    try:
        joint = _captured(question)
        found = compare(
            joint, question.solvers, (question.budget,), question.cost, question.time_limit
        )
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever the user's code raises is this question's row
        told = str(error) if isinstance(error, RematError) else f"{type(error).__name__}: {error}"
        return _without_answer(question, told)
    known = bool(found.step_cost and found.without_peak_bytes)
    return [
        SweepRow(
            model=question.model,
            cost=question.cost,
            of=question.of,
            row=row,
            priced=found.cost,
            without_peak_bytes=found.without_peak_bytes if known else None,
            without_step_cost=found.step_cost + found.without_recompute_cost if known else None,
        )
        for row in found.rows
    ]


def _marked(rows: Sequence[SweepRow]) -> Iterator[SweepRow]:
    """The rows with a mark at the best solver of each model, cost model and budget."""
    for _, group in groupby(rows, key=lambda r: (r.model, r.cost)):
        own = list(group)
        for row, marked in zip(own, mark_best([r.row for r in own]), strict=True):
            yield replace(row, row=marked)


def _without_answer(question: _Question, why: str) -> list[SweepRow]:
    return [
        SweepRow(
            model=question.model,
            cost=question.cost,
            of=question.of,
            row=ComparisonRow(solver=solver, budget=question.budget, reason=why),
        )
        for solver in question.solvers
    ]


#: The newest graph that was captured in this process, by its sweep and its model.
_NEWEST: dict[tuple[str, str], JointGraph] = {}


def _captured(question: _Question) -> JointGraph:
    source, key = question.source, (question.sweep, question.model)
    found = _NEWEST.get(key)
    if found is None:
        _NEWEST.clear()
        if isinstance(source, str):
            found = parse_joint(source)
        else:
            model, args, kwargs = source()
            found = capture(model, tuple(args), dict(kwargs), lower=question.lower)
        _NEWEST[key] = found
    return found


def _questions(
    models: Mapping[str, Model],
    budgets: AnyBudget | Sequence[AnyBudget],
    solvers: str | Iterable[str],
    costs: str | Iterable[str],
    time_limit: float | None,
    lower: str,
    executor: AnyExecutor,
) -> list[_Question]:
    """What is asked, checked as far as that can be done before anything is captured."""
    if not isinstance(models, Mapping) or not models:
        raise ProblemError(
            f"models is {models!r}; expected a dict of captured steps or functions by name, with at least one"
        )
    names = as_list("solvers", solvers, (str,))
    priced = as_list("costs", costs, (str,))
    read = [
        str(Budget.parse(b))
        for b in as_list("budgets", budgets, (str, int, float, Fraction, Budget, Peak, Saved))
    ]
    for cost in priced:
        for name in names:
            PlanRequest.of(solver=name, cost=cost, time_limit=time_limit)
    sources = {name: _source(name, model, executor) for name, model in models.items()}
    token = uuid.uuid4().hex
    return [
        _Question(
            sweep=token,
            model=name,
            of=_of(models[name], lower, time_limit),
            source=source,
            cost=cost,
            budget=budget,
            solvers=tuple(dict.fromkeys(names)),
            time_limit=time_limit,
            lower=lower,
        )
        for name, source in sources.items()
        for cost in dict.fromkeys(priced)
        for budget in dict.fromkeys(read)
    ]


def _of(model: Model, lower: str, time_limit: float | None) -> str:
    """What a row depends on besides model, cost model, budget and solver."""
    if isinstance(model, JointGraph):
        told = model.fingerprint[:16]
    else:
        name = getattr(model, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(model))
        told = f"{name} for {lower}"
    return told if time_limit is None else f"{told}, at most {time_limit:g} s"


def _left(question: _Question, solvers: Sequence[str]) -> _Question:
    told = {f.name: getattr(question, f.name) for f in fields(question)}
    return _Question(**told | {"solvers": tuple(solvers)})


def _source(name: str, model: Any, executor: AnyExecutor) -> str | Callable[[], Any]:
    if isinstance(model, JointGraph):
        return print_joint(model)
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


class _Journal:
    """The rows that are known, each on disk as soon as it is.

    A line of JSON for each, behind one that names the version; a last line that was cut off is left out.
    """

    def __init__(self, path: Path | None) -> None:
        self._table = path
        self._path = None if path is None else path.with_name(f"{path.name}.partial")
        self.known: dict[tuple[str, ...], SweepRow] = {}
        self._file: Any = None
        self._lock: Any = None

    def __enter__(self) -> _Journal:
        if self._table is None or self._path is None:
            return self
        self._take()
        if self._table.exists():
            self.known |= {row.key: row for row in Sweep.load(self._table).rows}
        head = {"remat_sweep": VERSION, "remat": __version__, "torch": torch.__version__}
        lines = self._lines()
        if lines and lines[0] != head:
            raise ProblemError(
                f"'{self._path}' was written by other versions ({lines[0]}) than these ({head}): finish it there, or "
                "delete it to begin anew"
            )
        for told in lines[1:]:
            row = SweepRow.from_dict(told)
            self.known[row.key] = row
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, "".join(json.dumps(told) + "\n" for told in (lines or [head])))
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ProblemError(
                f"'{self._path}' cannot be written: {error.strerror or error}"
            ) from error
        return self

    def _take(self) -> None:
        """Takes the output for this sweep alone.

        Raises:
            ProblemError: another one has it, or it cannot be written.
        """
        assert self._path is not None
        assert self._table is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self._table.with_name(f"{self._table.name}.lock"))
            self._lock.acquire(timeout=0)
        except Timeout:
            self._lock = None
            raise ProblemError(
                f"another sweep is writing '{self._table}': wait for it, or name another output"
            ) from None
        except OSError as error:
            self._lock = None
            raise ProblemError(
                f"'{self._table}' cannot be written: {error.strerror or error}"
            ) from error

    def _lines(self) -> list[Any]:
        assert self._path is not None
        found: list[Any] = []
        with contextlib.suppress(FileNotFoundError):
            for text in self._path.read_text(encoding="utf-8", errors="replace").splitlines(
                keepends=True
            ):
                if not text.endswith("\n"):
                    break  # cut off
                try:
                    told = json.loads(text)
                except (ValueError, RecursionError):
                    break
                if not isinstance(told, dict) or (found and set(told) != set(COLUMNS)):
                    break  # damaged: what follows is asked again
                found.append(told)
        return found

    def add(self, row: SweepRow) -> None:
        """Notes a row; one that is known already is not counted again."""
        if row.key in self.known:
            return
        self.known[row.key] = row
        if self._file is not None:
            try:
                self._file.write(json.dumps(row.as_dict()) + "\n")
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise ProblemError(
                    f"'{self._path}' cannot be written: {error.strerror or error}; with room for it the same "
                    "sweep goes on from the rows that it has"
                ) from error

    def done(self) -> None:
        """The table holds all: the lines go."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the end of a row that could not be written
                self._file.close()
        if self._lock is not None:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
