"""Jobs in this process, in worker processes, and in any executor: each answered once, whatever dies."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.errors import ProblemError
from remat.graph import purity
from remat.running.jobs import AnyExecutor, run_jobs


def square(job: int) -> int:
    return job * job


def surroundings(variable: str) -> tuple[tuple[str, ...], str | None]:
    return purity.declared(), os.environ.get(variable)


def dying(job: tuple[int, str]) -> int:
    """Job 2 ends its process the first time, and job 3 every time."""
    number, folder = job
    mark = Path(folder) / "died"
    if number == 3:
        os._exit(1)
    if number == 2 and not mark.exists():
        mark.touch()
        os._exit(1)
    return number


def answers(
    work: Any, jobs: list[Any], executor: AnyExecutor
) -> tuple[dict[int, Any], dict[int, str]]:
    found: dict[int, Any] = {}
    dead: dict[int, str] = {}

    def note(k: int, answer: Any) -> None:
        assert k not in found, "answered twice"
        found[k] = answer

    run_jobs(work, jobs, executor, note, dead.__setitem__)
    return found, dead


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers, because most of them die soon, and a fork of this process has imported everything."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)


def test_all_are_answered_wherever_they_run() -> None:
    expected = {k: (k + 3) ** 2 for k in range(5)}
    jobs = [k + 3 for k in range(5)]
    with ThreadPoolExecutor(2) as threads:
        for executor in (None, threads):
            assert answers(square, jobs, executor) == (expected, {})


def test_workers_know_what_is_declared_and_set_here_as_long_as_they_work_for_it(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    jobs = ["PYTHONSAFEPATH"]
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = purity.declared()
    with ProcessPoolExecutor(1) as pool:
        assert (
            answers(surroundings, jobs, pool)[0][0][0] == before
        )  # the executor's process starts now
        remat.declare_pure("aten::sin.out")
        try:
            now = tuple(sorted({*before, "aten::sin.out"}))
            assert answers(surroundings, jobs, pool)[0][0][0] == now
            assert answers(surroundings, jobs, 1)[0] == {0: (now, None)}
        finally:
            remat.undeclare_pure("aten::sin.out")
        assert answers(surroundings, jobs, pool)[0][0][0] == before
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    request.getfixturevalue("forked")
    assert answers(surroundings, jobs, 1)[0] == {0: (before, "1")}
    assert os.environ["PYTHONSAFEPATH"] == "1"


@pytest.mark.usefixtures("forked")
def test_what_died_is_asked_again_and_nothing_is_lost(tmp_path: Path) -> None:
    found, dead = answers(dying, [(k, str(tmp_path)) for k in range(5)], 2)
    assert found == {k: k for k in range(5) if k != 3}
    assert set(dead) == {3}
    assert (tmp_path / "died").exists()


def test_an_executor_whose_workers_die_says_what_to_do(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1) as pool, pytest.raises(ProblemError, match="give a new executor"):
        answers(dying, [(k, str(tmp_path)) for k in range(5)], pool)
    with pytest.raises(ProblemError, match="5 of 5 questions not answered"):
        answers(square, list(range(5)), pool)


def test_workers_without_remat_are_told_of() -> None:
    class Elsewhere(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(ModuleNotFoundError("No module named 'remat'", name="remat"))
            return future

    with pytest.raises(ProblemError, match="cannot import 'remat': install remat there"):
        answers(square, [1], Elsewhere())


@pytest.mark.parametrize("executor", [0, -1, True, "dask", 2.0])
def test_what_is_no_executor_is_refused(executor: Any) -> None:
    with pytest.raises(ProblemError, match=r"expected a concurrent\.futures\.Executor"):
        run_jobs(square, [1], executor, lambda k, a: None, lambda k, why: None)


def interrupt(place: int, answer: Any) -> None:
    raise KeyboardInterrupt


def slow(job: int) -> int:
    if job:
        time.sleep(60)
    return job


@pytest.mark.usefixtures("forked")
def test_who_is_interrupted_leaves_no_process_behind() -> None:
    before = multiprocessing.active_children()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(slow, [0, 1], 2, interrupt, lambda k, why: None)
    left = [p for p in multiprocessing.active_children() if p not in before]
    # The pool's thread may be reaping the processes, and `is_alive` is True until the thread is done.
    assert all(connection.wait([p.sentinel], 10) for p in left)
    assert time.perf_counter() - start < 50, "nobody waited for the job that was not done"
