"""Many questions to be answered one after the other, by a number of processes, or by any executor.

An executor is any `concurrent.futures.Executor`: a process pool, Dask's ``Client.get_executor()``, Ray's. Answers
are handed over as they come; what a worker that dies was at work on is asked again.
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

#: How often a job is asked again after the process that was at work on it died.
RETRIES = 1
#: What runs jobs: None for this process, a number of processes, or an executor.
AnyExecutor = Executor | int | None


def check_executor(executor: AnyExecutor) -> None:
    """Refuse an executor that cannot run jobs.

    Raises:
        ProblemError: it is no executor, no whole number from 1 on, and not None.
    """
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


def name_to_send(given: Any, what: str) -> str:
    """A name, for what a worker makes anew from it.

    Raises:
        ProblemError: it is something else.
    """
    if isinstance(given, str):
        return given
    raise ProblemError(
        f"{what} {given!r} cannot be sent to an executor; give its name, of a plugin or as module:Class"
    )


def run_jobs(
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    executor: AnyExecutor,
    on_answer: Callable[[int, Answer], None],
    on_death: Callable[[int, str], None],
) -> None:
    """Answers every job once.

    Workers know an operator as a function of its inputs where `remat.declare_pure` was called here.

    Args:
        work: answers one job; what it raises ends everything. With an executor it is a function of a module, and
            jobs and answers can be pickled.
        jobs: what to answer.
        executor: where.
        on_answer: called here with the place of a job and its answer, in the order in which they come.
        on_death: called here with the place of a job and why there is none, where processes of our own die of it.

    Raises:
        ProblemError: it is no executor, its workers are gone, or they cannot import remat.
    """
    check_executor(executor)
    if executor is None:
        for k, job in enumerate(jobs):
            on_answer(k, work(job))
        return
    from remat.graph.purity import declared

    work = partial(_declaring, work, declared())
    if isinstance(executor, Executor):
        left = _submitted(executor, work, jobs, range(len(jobs)), on_answer)
        if left:
            raise ProblemError(
                f"the workers of the executor are gone, with {len(left)} of {len(jobs)} questions not answered: "
                "give a new executor; with an output file, what was answered is not asked again"
            )
    else:
        _in_processes(work, jobs, executor, on_answer, on_death)


def _declaring(work: Callable[[Job], Answer], declared: Sequence[str], job: Job) -> Answer:
    """Answers one job under the declarations of the process that asks."""
    from remat.graph.purity import also_declared

    with also_declared(declared):
        return work(job)


#: Python's variable by which an interpreter leaves the working directory off its path. Else Python puts that directory
#: first on the path of a new interpreter, before it takes over ours, and imports from there while it starts.
_SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that start meanwhile import nothing from the working directory until they take over our path."""
    before = os.environ.get(_SAFE_PATH)
    _put_safe_path("1")
    try:
        yield
    finally:
        _put_safe_path(before)


def _put_safe_path(value: str | None) -> None:
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
    """Runs jobs in processes of our own; where one dies, all are started again."""
    deaths: Counter[int] = Counter()
    left = list(range(len(jobs)))
    suspects = (
        0  # that many of the first may be what a process died of: they are asked one at a time
    )
    while left:
        asked = left[:1] if suspects else left
        before, given = multiprocessing.active_children(), os.environ.get(_SAFE_PATH)
        with _safe_path():  # multiprocessing starts a process for its semaphores
            pool = ProcessPoolExecutor(
                1 if suspects else count,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_put_safe_path,  # the variable is not for what a job starts
                initargs=(given,),
            )
        try:
            lost = _submitted(pool, work, jobs, asked, on_answer, starting=_safe_path)
        except BaseException:  # an interrupt, too: nobody waits for what is not wanted any more
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in before:
                    process.terminate()
            raise
        pool.shutdown()
        if not suspects:
            left, suspects = lost, min(count, len(lost))
            continue
        deaths.update(lost)
        if not lost or deaths[asked[0]] > RETRIES:
            left, suspects = left[1:], suspects - 1
        if deaths[asked[0]] > RETRIES:
            on_death(asked[0], "the process that worked on it died")


def _submitted(
    executor: Executor,
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    asked: Sequence[int],
    on_answer: Callable[[int, Answer], None],
    starting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[int]:
    """Hands jobs to an executor, which starts its processes meanwhile; returns the places of those that it did not answer, in their order."""
    waiting: dict[Future[Answer], int] = {}
    lost: list[int] = []
    try:
        with starting():
            for k in asked:
                waiting[executor.submit(work, jobs[k])] = k
    except (BrokenExecutor, RuntimeError):  # it broke, or was shut down
        lost = [k for k in asked if k not in waiting.values()]
    try:
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                k = waiting.pop(future)
                try:
                    answer = future.result()
                except (BrokenExecutor, CancelledError):
                    lost.append(k)
                    continue
                except ModuleNotFoundError as error:
                    raise _without(error) from error
                on_answer(k, answer)
    finally:
        for future in waiting:
            future.cancel()
    return sorted(lost)


def _without(error: ModuleNotFoundError) -> ProblemError:
    return ProblemError(
        f"the workers of the executor cannot import '{error.name}': install remat there, in the version that "
        "asks, with all that the models need"
    )
