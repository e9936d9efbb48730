"""A process of its own for a solver, so that nothing it does takes the planner down.

`isolated` wraps a solver. Its process starts at once and stays between calls, so that what is timed
is the solver; it is a fresh interpreter, never a fork. What it prints is caught, memory is limited,
and who does not come back in time is killed, with whatever processes it has started. All of this
ends in a `SolverError` that says what happened; the next call starts a new process.

This keeps accidents apart, not enemies: the process runs with the user's rights.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, BinaryIO, ClassVar, NoReturn

from remat.errors import ProblemError, SolverError
from remat.solvers.base import Solver
from remat.solvers.graph_problem import GraphProblem
from remat.solvers.problem import KnapsackProblem
from remat.solvers.solution import Answer

_START_S = 120.0  # importing a plugin may import torch
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
    """Wrap a solver so that it runs in a process of its own.

    Args:
        solver: whom to run there; its class must be importable by name.
        memory_bytes: how much it may allocate beyond what it has after its imports; None: no
            limit. Not enforced on macOS.
        grace_s: seconds beyond a time limit after which it is killed.
        hang_s: seconds after which it is killed where there is no time limit; None: never.
        environment: variables of the process, on top of this one's.

    Returns:
        A solver with the same name and capabilities.

    Raises:
        SolverError: it cannot run in a process of its own; the message says why.
        ProblemError: an argument is not what it must be.
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
        **{flag: getattr(kind, flag) for flag in _CAPABILITIES},
        "cannot_run": classmethod(lambda cls: kind.cannot_run()),
    }
    wrapper: type[Isolated] = type(f"Isolated{kind.__name__}", (Isolated,), namespace)
    wrapper.knapsack, wrapper.graph = kind.knapsack, kind.graph
    return wrapper(
        _Worker(solver, memory_bytes=memory_bytes, environment=environment),
        grace_s=grace_s,
        hang_s=hang_s,
    )


_CAPABILITIES = (
    "name",
    "summary",
    "exact",
    "deterministic",
    "time_limit",
    "integer_limit",
    "requires",
    "extra",
)


def obstacle(solver: Solver) -> str | None:
    """Return why a solver cannot run in a process of its own, or None if it can."""
    kind = type(solver)
    if os.name != "posix":
        return "that needs a POSIX system"
    if "<locals>" in kind.__qualname__:
        return f"{kind.__qualname__} is defined in a function: define it at the top of a module"
    if kind.__module__ == "__main__" and _main_file() is None:
        return f"{kind.__qualname__} was typed in: put it into a file that can be imported"
    try:
        pickle.dumps(solver)
    except Exception as error:
        return f"it cannot be pickled: {error}"
    return None


class Isolated(Solver):
    """A solver in a process of its own; made by `isolated`."""

    __slots__ = ("_grace_s", "_hang_s", "_worker")

    name: ClassVar[str] = "isolated"

    def __init__(self, worker: _Worker, *, grace_s: float, hang_s: float | None) -> None:
        self._worker = worker
        self._grace_s = grace_s
        self._hang_s = hang_s
        worker.start()

    @property
    def inner(self) -> Solver:
        """The solver that runs in the process."""
        return self._worker.solver

    def refuses(self, problem: KnapsackProblem) -> str | None:
        """Ask the solver, in its process."""
        reply = self._worker.ask("refuses", problem, None, within_s=_ASK_S)
        reason: str | None = reply["reason"]
        return reason

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> Answer:
        """Let the solver work in its process, and end it if it does not come back."""
        within_s = self._hang_s if time_limit is None else time_limit + self._grace_s
        reply = self._worker.ask("solve", problem, time_limit, within_s=within_s)
        return Answer(reply["saved"], reply["bound"], by_clock=reply["by_clock"])

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Let the solver work on a graph in its process, and end it if it does not come back."""
        within_s = self._hang_s if time_limit is None else time_limit + self._grace_s
        reply = self._worker.ask("solve_graph", problem, time_limit, within_s=within_s)
        return Answer(reply["saved"], reply["bound"], by_clock=reply["by_clock"])

    def close(self) -> None:
        """End the process; the next call starts a new one."""
        self._worker.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        return isolated, (self.inner,)


class _Worker:
    """One solver's process: started, asked, and ended when it misbehaves."""

    def __init__(
        self, solver: Solver, *, memory_bytes: int | None, environment: Mapping[str, str] | None
    ) -> None:
        self.solver = solver
        self._memory_bytes = memory_bytes
        self._environment = dict(environment or {})
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, unless it runs."""
        with self._lock:
            self._running()

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def ask(
        self,
        what: str,
        problem: KnapsackProblem | GraphProblem,
        time_limit: float | None,
        within_s: float | None,
    ) -> dict[str, Any]:
        """Put a question to the process and return the reply.

        Raises:
            SolverError: it raised, answered wrongly, died or was killed.
        """
        with self._lock:
            process = self._running()
            request = pickle.dumps((what, problem, time_limit))
            limit = f" (time limit {time_limit:g} s)" if time_limit is not None else ""
            return self._exchange(process, request, within_s, limit)

    def _running(self) -> _Process:
        process = self._process
        if process is not None and process.alive():
            return process
        self._end()
        self._process = process = _Process(self._environment)
        setup = {
            "name": self.solver.name,
            "path": sys.path,
            "main": _main_file() if type(self.solver).__module__ == "__main__" else None,
            "memory_bytes": self._memory_bytes,
        }
        request = json.dumps(setup).encode() + b"\n" + pickle.dumps(self.solver)
        self._exchange(process, request, _START_S, " while starting")
        return process

    def _exchange(
        self, process: _Process, request: bytes, within_s: float | None, when: str
    ) -> dict[str, Any]:
        try:
            data = process.exchange(request, within_s)
            reply: dict[str, Any] = json.loads(data)
        except TimeoutError:
            self._fail(process, f"did not return within {within_s:g} s{when} and was killed")
        except EOFError:
            self._fail(process, f"killed its process{when}: {process.death()}")
        except ValueError as error:
            self._fail(process, f"garbled the reply of its process{when}: {error}")
        except (
            BaseException
        ):  # an interrupt: the reply would be taken for that to the next question
            self._end()
            raise
        if reply.get("exhausted"):
            self._fail(process, f"ran out of memory{when}: {self._room()}")
        if "error" in reply:
            failure = SolverError(self.solver.name, reply["error"])
            for note in reply["notes"]:
                failure.add_note(note)
            raise failure
        return reply

    def _room(self) -> str:
        if self._memory_bytes is None:
            return "there is none left"
        return f"it may have {self._memory_bytes / 2**20:,.0f} MiB"

    def _fail(self, process: _Process, what: str) -> NoReturn:
        self._end()
        name = self.solver.name
        printed = process.tail()
        last = f"; it printed last: {printed.splitlines()[-1][:200]!r}" if printed else ""
        error = SolverError(name, f"solver '{name}' {what}{last}")
        if printed:
            error.add_note(printed)
        raise error from None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()


class _Process:
    """A fresh interpreter that answers length-prefixed messages on pipes of its own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from remat.solvers.isolation_worker import main; main({theirs_in}, {theirs_out})"
        )
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self._requests, False)
        self._owner = os.getpid()
        self._printed: deque[bytes] = deque(maxlen=_TAIL_BYTES)
        assert self._child.stdout is not None
        self._drain = threading.Thread(
            target=_drain, args=(self._child.stdout, self._printed), daemon=True
        )
        self._drain.start()
        self._finalizer = weakref.finalize(
            self, _kill, self._child, self._owner, (self._requests, self._replies)
        )

    def alive(self) -> bool:
        """Whether it runs, and is ours: after a fork it belongs to the parent."""
        return self._owner == os.getpid() and self._child.poll() is None

    def exchange(self, request: bytes, within_s: float | None) -> bytes:
        """Send a message and wait for one.

        Raises:
            TimeoutError: the time is over.
            EOFError: the process is gone.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        head = struct.pack("<Qd", len(request), within_s or 0.0)
        self._send(head + request, deadline)
        (length,) = struct.unpack("<Q", self._receive(8, deadline))
        return self._receive(length, deadline)

    def _send(self, data: bytes, deadline: float | None) -> None:
        view = memoryview(data)
        while view:
            _wait((), (self._requests,), deadline)
            try:
                view = view[os.write(self._requests, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EOFError from None

    def _receive(self, count: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            _wait((self._replies,), (), deadline)
            part = os.read(self._replies, min(count - len(data), 2**20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def death(self) -> str:
        """How it ended, once its pipe is closed."""
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its pipes"
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def tail(self) -> str:
        """The last of what it printed; complete once it is dead."""
        self._drain.join(timeout=1)
        return b"".join(self._printed).decode(errors="replace").strip()

    def kill(self) -> None:
        """End it and all that it has started."""
        self._finalizer()


def _wait(read: tuple[int, ...], write: tuple[int, ...], deadline: float | None) -> None:
    poll = select.poll()
    for fd in read:
        poll.register(fd, select.POLLIN)
    for fd in write:
        poll.register(fd, select.POLLOUT)
    left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
    if not poll.poll(left_ms):
        raise TimeoutError


def _drain(stream: BinaryIO, into: deque[bytes]) -> None:
    with stream:
        while data := os.read(stream.fileno(), 2**16):
            into.extend(data[i : i + 1] for i in range(max(0, len(data) - _TAIL_BYTES), len(data)))


def _kill(child: subprocess.Popen[bytes], owner: int, pipes: tuple[int, ...]) -> None:
    for fd in pipes:
        os.close(fd)
    if owner != os.getpid():
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)  # a session of its own, so a group of its own
    except (ProcessLookupError, PermissionError):
        child.kill()
    child.wait()


def _main_file() -> str | None:
    """The script that this process runs, if it is one."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) and os.path.isfile(path) else None
