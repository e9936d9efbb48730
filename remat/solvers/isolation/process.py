"""Run a solver in its own process, so that its crash does not end the planner.

The solver's process is a fresh interpreter, not a fork. `isolated` starts the process at once, and the process stays
alive between calls, so the time of a call does not include start-up. A process that does not return in time is killed,
with all processes that it started. A crash, a lack of memory and a kill each raise a `SolverError` that names the
cause. After a crash or a kill, the next call starts a new process.

Isolation protects against a solver's faults, not against malicious code, because the process has the user's rights.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, BinaryIO, ClassVar, NamedTuple, NoReturn

from remat.errors import BudgetError, ProblemError, RefusalError, SolverError
from remat.solvers.base import Solver
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.problem import KnapsackProblem, Problem
from remat.solvers.schedule.problem import ScheduleProblem
from remat.solvers.solution import Answer, Status

_START_S = 120.0  # long, because importing a plugin may import torch
_ASK_S = 60.0
_TAIL_BYTES = 2_000


def isolated(
    solver: Solver,
    *,
    memory_bytes: int | None = 4 * 2**30,
    grace_s: float = 2.0,
    hang_s: float | None = 600.0,
    environment: Mapping[str, str] | None = None,
) -> Solver:
    """Wrap a solver so that it runs in its own process, and start this process.

    Args:
        solver: the solver to run in the process; its class must be importable by name.
        memory_bytes: bytes that the process may allocate after its imports; None: no limit. The limit
            is not enforced on macOS.
        grace_s: seconds beyond a call's time limit after which the process is killed.
        hang_s: seconds after which the process is killed if a call has no time limit; None:
            such a call may take any time.
        environment: environment variables of the process, in addition to those of this process.

    Returns:
        A solver with the name and capabilities of ``solver``; ``solver`` itself if it is already
        isolated.

    Raises:
        SolverError: the solver cannot run in its own process; the message says why.
        ProblemError: an argument is invalid.
    """
    if isinstance(solver, Isolated):
        return solver
    if not isinstance(solver, Solver):
        raise ProblemError(f"solver must be an instance of remat.Solver, got {solver!r}")
    for name, number in (("grace_s", grace_s), ("hang_s", hang_s), ("memory_bytes", memory_bytes)):
        if number is not None and not number > 0:
            raise ProblemError(f"{name} must be above 0, got {number}")
    reason = obstacle(solver)
    if reason is not None:
        raise SolverError(
            solver.name, f"solver '{solver.name}' cannot run in a process of its own: {reason}"
        )
    kind = type(solver)
    namespace = {
        "__slots__": (),
        "__module__": __name__,
        "__doc__": kind.__doc__,
        "cannot_run": classmethod(lambda cls: kind.cannot_run()),
    }
    wrapper: type[Isolated] = type(f"Isolated{kind.__name__}", (Isolated,), namespace)
    # Set capabilities after the class is created: `__init_subclass__` derives `solves` from `Isolated`,
    # which has the methods for all kinds of problems.
    for capability in Solver.__annotations__:
        setattr(wrapper, capability, getattr(kind, capability))
    isolated_solver = wrapper(solver, _Limits(memory_bytes, grace_s, hang_s, environment))
    # Start now, so that the time limit of the first call does not include the imports of the solver.
    isolated_solver.start()
    return isolated_solver


def obstacle(solver: Solver) -> str | None:
    """Return why a solver cannot run in its own process; None if it can."""
    kind = type(solver)
    if os.name != "posix":
        return "that needs a POSIX system"
    if kind.__module__ == "__main__" and _main_file() is None:
        return f"{kind.__qualname__} was typed in: put it into a file that can be imported"
    try:
        pickle.dumps(solver)
    except Exception as error:
        return f"it cannot be pickled: {error}. Define its class at the top of a module"
    return None


class _Limits(NamedTuple):
    """Limits and environment of a solver's process; see the arguments of `isolated`."""

    memory_bytes: int | None
    grace_s: float
    hang_s: float | None
    environment: Mapping[str, str] | None


class Isolated(Solver):
    """A solver that runs another solver, ``inner``, in a separate process; created by `isolated`."""

    name: ClassVar[str] = "isolated"

    def __init__(self, inner: Solver, limits: _Limits) -> None:
        self.inner, self._limits = inner, limits
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def refuses(self, problem: KnapsackProblem) -> str | None:
        """Return why the solver in the separate process refuses a knapsack; None if it accepts the knapsack."""
        reason: str | None = self._ask(("refuses", problem, None), _ASK_S)["reason"]
        return reason

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> Answer:
        """Solve a knapsack in the solver's process, and kill the process if it does not return in time."""
        return self._solve(problem, time_limit)

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Solve a graph problem in the solver's process, and kill the process if it does not return in time."""
        return self._solve(problem, time_limit)

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> Answer:
        """Solve a schedule problem in the solver's process, and kill the process if it does not return in time."""
        return self._solve(problem, time_limit)

    def start(self) -> None:
        """Start the solver's process unless it is running."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Kill the solver's process; the next call of a method starts a new one."""
        with self._lock:
            self._end()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process starts a solver process of its own.
        return functools.partial(isolated, **self._limits._asdict()), (self.inner,)

    def _solve(self, problem: Problem[Any], time_limit: float | None) -> Answer:
        """Run the solver on a problem in the solver's process, and return the answer, which is not verified yet."""
        within_s, when = self._limits.hang_s, ""
        if time_limit is not None:
            within_s, when = time_limit + self._limits.grace_s, f" (time limit {time_limit:g} s)"
        # The solver's process parses the answer with `read`; the process of the caller verifies it later.
        reply = self._ask((problem.method, problem, time_limit), within_s, when)
        status = None if reply["status"] is None else Status(reply["status"])
        return Answer(**{**reply, "status": status})

    def _ask(
        self, question: tuple[Any, ...], within_s: float | None, when: str = ""
    ) -> dict[str, Any]:
        """Send a question to the solver's process and return its reply; ``when`` becomes a part of error messages."""
        with self._lock:
            return self._exchange(self._running(), pickle.dumps(question), within_s, when)

    def _running(self) -> _Process:
        process = self._process
        if process is not None and process.alive():
            return process
        self._end()
        self._process = process = _Process(self._limits.environment or {})
        main = _main_file() if type(self.inner).__module__ == "__main__" else None
        setup = (self.name, main, self._limits.memory_bytes, pickle.dumps(self.inner))
        self._exchange(process, pickle.dumps(setup), _START_S, " while starting")
        return process

    def _exchange(
        self, process: _Process, message: bytes, within_s: float | None, when: str
    ) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(process.exchange(message, within_s))
        except TimeoutError:
            self._fail(process, f"did not return within {within_s:g} s{when} and was killed")
        except (EOFError, OSError):
            self._fail(process, f"ended its process{when}: {process.death()}")
        except ValueError as error:
            self._fail(process, f"garbled the reply of its process{when}: {error}")
        except BaseException:
            # An interrupt. Kill the process, or its late reply would answer the next question.
            self._end()
            raise
        if reply.get("exhausted"):
            room = "there is none left"
            if self._limits.memory_bytes is not None:
                room = f"it may have {self._limits.memory_bytes / 2**20:,.0f} MiB"
            self._fail(process, f"ran out of memory{when}: {room}")
        if "over" in reply:
            raise BudgetError(reply["over"])
        if "error" in reply:
            failure = (RefusalError if reply["refused"] else SolverError)(self.name, reply["error"])
            for note in reply["notes"]:
                failure.add_note(note)
            raise failure
        return reply

    def _fail(self, process: _Process, failure: str) -> NoReturn:
        self._end()
        printed = process.tail()
        last = f"; it printed last: {printed.splitlines()[-1][:200]!r}" if printed else ""
        error = SolverError(self.name, f"solver '{self.name}' {failure}{last}")
        if printed:
            error.add_note(printed)
        raise error from None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()


class _Process:
    """A new Python interpreter that runs one solver and answers messages over a connection."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from remat.solvers.isolation.worker import main; main({theirs.fileno()})"
        )
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,  # a solver that reads it must not wait for the user
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._printed = deque[int](maxlen=_TAIL_BYTES)
        assert self._child.stdout is not None
        # Read the output all the time: a full pipe would block a solver that prints much.
        self._drain = threading.Thread(
            target=_drain, args=(self._child.stdout, self._printed), daemon=True
        )
        self._drain.start()
        # Also kills the process when this object is garbage collected, and at interpreter exit.
        self._finalizer = weakref.finalize(self, _end, self._child, self._owner, self._connection)

    def alive(self) -> bool:
        """Return whether the solver's process runs and the calling process started it."""
        # After a fork, the child must not use the solver process of its parent.
        return self._owner == os.getpid() and self._child.poll() is None

    def exchange(self, message: bytes, within_s: float | None) -> bytes:
        """Send a message and return its reply; raise TimeoutError for a late reply, EOFError or OSError for none."""
        deadline = time.monotonic() + (float("inf") if within_s is None else within_s)
        # `send` and `recv_bytes` have no time limit. The watchdog kills a process that does not read the
        # message, or whose reply is late. The connection then ends.
        watchdog = threading.Timer(within_s or 0.0, _kill, (self._child,))
        watchdog.daemon = True
        if within_s is not None:
            watchdog.start()
        try:
            # Send the limit too: the child sets an alarm, which ends it even if this process dies.
            self._connection.send((within_s, message))
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            if time.monotonic() < deadline:
                raise
            raise TimeoutError from error
        finally:
            watchdog.cancel()

    def death(self) -> str:
        """Wait up to 5 s for the process to end, and describe how it ended, such as ``exit status 1``."""
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"exit status {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"

    def tail(self) -> str:
        """Return the last 2,000 bytes of the process's output; call this method only after the process has ended."""
        self._drain.join(timeout=1)
        return bytes(self._printed).decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        self._finalizer()


def _drain(stream: BinaryIO, into: deque[int]) -> None:
    with stream:
        while data := os.read(stream.fileno(), 2**16):
            into.extend(data[-_TAIL_BYTES:])


def _end(child: subprocess.Popen[bytes], owner: int, connection: Connection[Any, Any]) -> None:
    connection.close()
    if owner == os.getpid():
        _kill(child)
        child.wait()


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        # The child leads a new session, so its group has no process but the child's own ones.
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()


def _main_file() -> str | None:
    """Return the path of the script that the calling process runs; None if it runs no file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) and os.path.isfile(path) else None
