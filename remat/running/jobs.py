"""Run many jobs in this process, in worker processes, or in any executor.

An executor is any `concurrent.futures.Executor`, such as a process pool, the result of Dask's
``Client.get_executor()``, or an executor of Ray. The result of a job is called its answer. The caller gets
each answer as soon as it arrives. If a worker process that remat started dies, the jobs of
that process are submitted again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from functools import partial
from typing import Any, TypeVar

from remat.errors import ProblemError

Job = TypeVar("Job")
Answer = TypeVar("Answer")

#: Number of times that a job that runs alone is submitted again after its worker process died.
RETRIES = 1
#: Type of an argument that says where jobs run: None for this process, a number of worker processes, or an executor.
AnyExecutor = Executor | int | None


def check_executor(executor: AnyExecutor) -> None:
    """Raise a ProblemError if ``executor`` is not an executor, an int of at least 1, or None."""
    number = isinstance(executor, int) and not isinstance(executor, bool)
    if (
        executor is None
        or (number and executor >= 1)  # type: ignore[operator]
        or isinstance(executor, Executor)
    ):
        return
    raise ProblemError(
        f"executor is {executor!r}; expected a concurrent.futures.Executor (of Dask: client.get_executor()), a "
        "number of processes from 1 on, or None for this process"
    )


def name_to_send(argument: Any, kind: str) -> str:
    """Return the name by which the user gave a solver or cost model; refuse an object instead of a name.

    A worker process creates the object that the name stands for.

    Args:
        argument: the user's argument: a name or an object.
        kind: kind of the argument for the message, such as ``"solver"``.

    Raises:
        ProblemError: ``argument`` is not a str.
    """
    if isinstance(argument, str):
        return argument
    raise ProblemError(
        f"{kind} {argument!r} cannot be sent to an executor; give its name, of a plugin or as module:Class"
    )


def run_jobs(
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    executor: AnyExecutor,
    on_answer: Callable[[int, Answer], None],
    on_death: Callable[[int, str], None],
) -> None:
    """Call ``work`` on every job, and pass each result, the job's answer, to ``on_answer``.

    Operators that `remat.declare_pure` has declared in this process are pure in worker processes, too.

    Args:
        work: computes the answer of one job; exceptions are raised in this process. For workers, ``work`` must be
            a module-level function, and jobs and answers must support pickling.
        jobs: the arguments with which ``work`` is called, one for each job.
        executor: where the jobs run; see `AnyExecutor`.
        on_answer: called in this process with the index of a job and its answer, in the order of arrival.
        on_death: called in this process with the index of a job and a reason, if worker processes that
            remat started died repeatedly while running the job.

    Raises:
        ProblemError: ``executor`` is invalid, or its workers have died or cannot import a module.
    """
    check_executor(executor)
    if executor is None:
        for k, job in enumerate(jobs):
            on_answer(k, work(job))
        return
    from remat.graph.purity import declared

    work = partial(_declaring, work, declared())
    if isinstance(executor, Executor):
        unanswered = _submitted(executor, work, jobs, range(len(jobs)), on_answer)
        if unanswered:
            raise ProblemError(
                f"the workers of the executor are gone, with {len(unanswered)} of {len(jobs)} questions not answered: "
                "give a new executor; with an output file, what was answered is not asked again"
            )
    else:
        _in_processes(work, jobs, executor, on_answer, on_death)


def _declaring(work: Callable[[Job], Answer], declared: Sequence[str], job: Job) -> Answer:
    """In a worker process, declare operators pure, then run one job and return its answer."""
    from remat.graph.purity import also_declared

    with also_declared(declared):
        return work(job)


#: Environment variable that keeps Python from putting the working directory first on ``sys.path``.
#: Without the variable, a new worker would import modules from the working directory while it
#: starts, before it gets the ``sys.path`` of this process.
_SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Set the environment variable ``PYTHONSAFEPATH`` inside the ``with`` block, then restore it."""
    before = os.environ.get(_SAFE_PATH)
    _put_safe_path("1")
    try:
        yield
    finally:
        _put_safe_path(before)


def _put_safe_path(value: str | None) -> None:
    """Set the environment variable ``PYTHONSAFEPATH``, or delete it if ``value`` is None."""
    if value is None:
        os.environ.pop(_SAFE_PATH, None)
    else:
        os.environ[_SAFE_PATH] = value


def _in_processes(
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    count: int,
    on_answer: Callable[[int, Answer], None],
    on_death: Callable[[int, str], None],
) -> None:
    """Run jobs in ``count`` worker processes, and restart the processes if one dies; see `run_jobs`."""
    # After a death, the first `count` unanswered jobs run one at a time, because any of these jobs may have
    # killed the worker.
    deaths: Counter[int] = Counter()
    pending = list(range(len(jobs)))
    suspects = 0  # the first `suspects` jobs in `pending` may have killed a worker
    while pending:
        batch = pending[:1] if suspects else pending
        before, safe_path = multiprocessing.active_children(), os.environ.get(_SAFE_PATH)
        with _safe_path():
            # Creating the pool may start a process: multiprocessing's resource tracker.
            pool = ProcessPoolExecutor(
                1 if suspects else count,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_put_safe_path,  # so that processes that a job starts get the old value
                initargs=(safe_path,),
            )
        try:
            unanswered = _submitted(pool, work, jobs, batch, on_answer, starting=_safe_path)
        except BaseException:  # also KeyboardInterrupt: end the workers without waiting for jobs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in before:
                    process.terminate()
            raise
        pool.shutdown()
        if not suspects:
            pending, suspects = unanswered, min(count, len(unanswered))
            continue
        deaths.update(unanswered)
        if not unanswered or deaths[batch[0]] > RETRIES:
            pending, suspects = pending[1:], suspects - 1
        if deaths[batch[0]] > RETRIES:
            on_death(batch[0], "the process that worked on it died")


def _submitted(
    executor: Executor,
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    batch: Sequence[int],
    on_answer: Callable[[int, Answer], None],
    starting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[int]:
    """Run jobs in an executor, pass on each answer, and return the indices of jobs that the executor lost."""
    waiting: dict[Future[Answer], int] = {}
    unanswered: list[int] = []
    try:
        # The executor may start its processes now, so `starting` sets the environment that they inherit.
        with starting():
            for k in batch:
                waiting[executor.submit(work, jobs[k])] = k
    except (BrokenExecutor, RuntimeError):  # the executor is broken or shut down
        unanswered = [k for k in batch if k not in waiting.values()]
    try:
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                k = waiting.pop(future)
                try:
                    answer = future.result()
                except (BrokenExecutor, CancelledError):
                    unanswered.append(k)
                    continue
                except ModuleNotFoundError as error:
                    raise ProblemError(
                        f"the workers of the executor cannot import '{error.name}': install remat there, in the "
                        "version that asks, with all that the models need"
                    ) from error
                on_answer(k, answer)
    finally:
        for future in waiting:
            future.cancel()
    return sorted(unanswered)
