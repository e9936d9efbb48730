"""A solver in a process of its own: whatever it does, the planner gets an answer or a reason."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import foreign_solvers as foreign
import pytest

from remat.errors import ProblemError, RefusalError, SolverError
from remat.plugins import isolated, registry
from remat.solvers import KnapsackProblem, Solver, Status, run
from remat.solvers.isolation.process import _Process, obstacle
from remat.solvers.knapsack.dp import DynamicProgram
from remat.solvers.knapsack.greedy import Greedy

PROBLEM = KnapsackProblem((3, 4, 5), (30, 41, 50), 8)


def gone(pid: int) -> bool:
    """Whether a process is no more, or only waits to be reaped."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_the_same_answer_and_the_same_capabilities() -> None:
    for inner in (DynamicProgram(), Greedy(), foreign.Honest()):
        wrapped = isolated(inner)
        assert wrapped.name == inner.name
        assert (wrapped.exact, wrapped.deterministic) == (inner.exact, inner.deterministic)
        assert wrapped.solves == inner.solves
        assert isolated(wrapped) is wrapped
        here, there = run(inner, PROBLEM), run(wrapped, PROBLEM)
        assert (here.saved, here.bound, here.status) == (there.saved, there.bound, there.status)
        assert there.deterministic


def test_a_refusal_crosses_over() -> None:
    for solver in (foreign.Declines(), isolated(foreign.Declines())):
        with pytest.raises(RefusalError, match="too small for me"):
            run(solver, PROBLEM)


def test_numbers_of_any_size_and_options_cross_over() -> None:
    huge = KnapsackProblem((2**62, 2**61), (2**62, 2**61), 2**62)
    assert run(isolated(Greedy()), huge).value == 2**62
    assert run(isolated(foreign.Configured(2)), PROBLEM).saved == (2,)
    many = KnapsackProblem(range(20_000), range(20_000), 10**7)
    assert run(isolated(Greedy()), many).saved == run(Greedy(), many).saved


def test_the_process_stays_between_calls_and_goes_with_the_wrapper(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("REMAT_TEST_PIDS", str(tmp_path / "pids"))
    wrapped = isolated(foreign.Identified())
    run(wrapped, PROBLEM)
    run(wrapped, PROBLEM)
    first, second = map(int, (tmp_path / "pids").read_text().split())
    assert first == second != os.getpid()
    del wrapped
    gc.collect()
    assert gone(first)


@pytest.mark.parametrize(
    ("solver", "said"),
    [
        (foreign.Raises(), r"^solver 'raises' raised ValueError: no luck"),
        (foreign.RaisesInRefuses(), r"^solver 'raises-in-refuses' raised KeyError: 'size'"),
        (foreign.Refuses(), r"^solver 'refuses' refuses the problem: not today$"),
        (
            foreign.Exits(),
            r"^solver 'exits' ended its process: exit status 7; it printed last: 'about to leave'",
        ),
        (foreign.ExitsOrderly(), r"^solver 'exits-orderly' raised SystemExit: 3"),
        (
            foreign.Segfaults(),
            r"^solver 'segfaults' ended its process: signal 11 \(Segmentation fault\)",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Solver) else "",
)
def test_what_goes_wrong_is_said_under_its_name_and_the_next_call_works(solver, said) -> None:
    wrapped = isolated(solver)
    for _ in range(2):
        with pytest.raises(SolverError, match=said) as raised:
            run(wrapped, PROBLEM)
        assert raised.value.solver == solver.name
        assert isinstance(raised.value, RefusalError) is (solver.name == "refuses")
        assert "\n" not in str(raised.value)


def test_an_answer_is_judged_on_this_side_only() -> None:
    """The other process reads the answer; what it takes and claims is looked into once, here."""
    assert list(isolated(foreign.Overweight()).solve(PROBLEM).saved) == [0, 1, 2]
    wrong = isolated(foreign.ClaimsAll())
    assert wrong.solve(PROBLEM).status is Status.OPTIMAL
    with pytest.raises(SolverError, match=r"^solver 'claims-all' claims a value of 121, but its"):
        run(wrong, PROBLEM)


def test_the_traceback_of_the_other_process_comes_along() -> None:
    with pytest.raises(SolverError) as raised:
        run(isolated(foreign.Raises()), PROBLEM)
    assert 'raise ValueError("no luck")' in "".join(raised.value.__notes__)


def test_who_hangs_past_the_limit_is_killed() -> None:
    wrapped = isolated(foreign.Hangs(), grace_s=0.2)
    with pytest.raises(
        SolverError, match=r"^solver 'hangs' did not return within 0\.3 s"
    ) as raised:
        run(wrapped, PROBLEM, time_limit=0.1)
    assert "(time limit 0.1 s) and was killed" in str(raised.value)
    forever = isolated(foreign.Hangs(), hang_s=0.3)
    with pytest.raises(SolverError, match=r"did not return within 0\.3 s and was killed"):
        run(forever, PROBLEM)


def test_who_does_not_read_the_question_is_killed_in_time() -> None:
    wrapped = isolated(foreign.Honest(), grace_s=0.2)
    os.kill(wrapped._process._child.pid, signal.SIGSTOP)
    large = KnapsackProblem(range(2**40, 2**40 + 50_000), (1,) * 50_000, 2**45)
    with pytest.raises(SolverError, match=r"did not return within 0\.3 s .* and was killed"):
        wrapped.solve(large, time_limit=0.1)
    assert run(wrapped, PROBLEM).saved == (0, 1)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "signal 9 (Killed)"),
        (None, "it closed its connection"),
    ],
)
def test_how_a_process_ended_is_said(code: int | None, said: str) -> None:
    def wait(timeout: float) -> int:
        if code is None:
            raise subprocess.TimeoutExpired("python", timeout)
        return code

    process = SimpleNamespace(_child=SimpleNamespace(wait=wait))
    assert _Process.death(process) == said


def test_a_reply_that_is_none_is_said(monkeypatch) -> None:
    wrapped = isolated(foreign.Honest())
    monkeypatch.setattr(type(wrapped._process), "exchange", lambda *_: b"{")
    with pytest.raises(SolverError, match=r"^solver 'honest' garbled the reply of its process"):
        run(wrapped, PROBLEM)


def test_what_it_started_dies_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("REMAT_TEST_PIDS", str(tmp_path / "pid"))
    with pytest.raises(SolverError, match="was killed"):
        run(isolated(foreign.HangsWithChild(), grace_s=1), PROBLEM, time_limit=1)
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not limit address space")
def test_who_eats_memory_starves_alone() -> None:
    wrapped = isolated(foreign.EatsMemory(), memory_bytes=256 * 2**20)
    with pytest.raises(
        SolverError, match=r"^solver 'eats-memory' ran out of memory: it may have 256 MiB$"
    ):
        run(wrapped, PROBLEM)


def test_nothing_is_printed(capfd) -> None:
    solution = run(isolated(foreign.Prints()), PROBLEM)
    assert solution.saved == (0, 1)
    assert capfd.readouterr() == ("", "")


def test_who_cannot_be_loaded_says_so() -> None:
    with pytest.raises(
        SolverError,
        match=r"^solver 'fails-to-load' cannot be loaded in a process of its own: RuntimeError: no",
    ):
        isolated(foreign.FailsToLoad())


def test_what_cannot_be_isolated_says_why() -> None:
    class Local(foreign.Honest):
        pass

    assert "cannot be pickled" in str(obstacle(Local()))
    with pytest.raises(SolverError, match=r"'honest' cannot run in a process of its own: .*Local"):
        isolated(Local())
    with pytest.raises(ProblemError, match=r"^grace_s must be above 0, got 0"):
        isolated(Greedy(), grace_s=0)
    with pytest.raises(ProblemError, match=r"^solver must be an instance"):
        isolated("greedy")


@pytest.mark.parametrize("isolation", ["process", "foreign"])
def test_the_registry_hands_out_isolated_solvers(isolation) -> None:
    name = "foreign_solvers:Honest"
    wrapped = registry().solver(name, isolation=isolation)
    assert type(wrapped).__name__ == "IsolatedHonest"
    assert run(wrapped, PROBLEM).saved == (0, 1)
    for name in ("greedy", "remat.solvers.knapsack.greedy:Greedy"):
        ours = registry().solver(name, isolation=isolation)
        assert (ours == Greedy()) is (isolation == "foreign")
    with pytest.raises(SolverError, match="unknown solver 'gredy'"):
        registry().solver("gredy", isolation=isolation)
    with pytest.raises(ProblemError, match=r"^isolation must be one of None, 'process', 'foreign'"):
        registry().solver(name, isolation="thread")


def test_a_script_may_isolate_its_own_solver(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from remat import KnapsackProblem, Solver
            from remat.plugins import isolated
            from remat.solvers import run

            class Mine(Solver):
                name = "mine"

                def solve(self, problem, **kwargs):
                    return [1]

            if __name__ == "__main__":
                print(run(isolated(Mine()), KnapsackProblem((3, 4), (5, 6), 4)).saved)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout == "(1,)\n", done.stderr


def test_a_copy_keeps_the_limits() -> None:
    limits = {"memory_bytes": 2**31, "grace_s": 1.0, "hang_s": None, "environment": {"A": "b"}}
    made = isolated(registry().solver("greedy"), **limits)  # type: ignore[arg-type]
    other = pickle.loads(pickle.dumps(made))
    assert other._limits._asdict() == limits
