"""Run a solver inside its own process; the parent process runs `remat.solvers.isolation.process`.

The parent's questions and the worker's replies go through one connection, because the solver may print to standard
output. Questions are pickled, since the worker may trust the parent. Replies are JSON instead, so that a garbled reply
runs no code in the parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import signal
import traceback
from dataclasses import asdict
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from remat.errors import BudgetError, RefusalError, SolverError
from remat.solvers.base import Solver
from remat.solvers.run import solver_errors
from remat.solvers.verify import read

# Build this reply at import, because after a lack of memory even that may fail.
_EXHAUSTED = json.dumps({"exhausted": True}).encode()
_ORPHAN_S = 30.0


def main(fd: int) -> None:
    """Load the solver, then answer questions on file descriptor ``fd`` until the parent closes the connection."""
    os.set_inheritable(fd, False)  # child processes of the solver must not keep the connection open
    faulthandler.enable()
    connection: Connection[Any, Any] = Connection(fd)
    with contextlib.suppress(EOFError):
        solver, reply = _set_up(_receive(connection))
        connection.send_bytes(reply)
        while solver is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            reply = _answer(solver, _receive(connection))
            connection.send_bytes(reply)


def _receive(connection: Connection[Any, Any]) -> bytes:
    """Return the parent's next message, and set an alarm that ends this process if it answers the message too late."""
    within_s, message = connection.recv()
    # The parent kills a late process at the limit. The alarm, 30 s later, is for the case that the parent has died.
    if within_s is not None:  # the operating system's alarm also ends C code that hangs
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, within_s + _ORPHAN_S)
    data: bytes = message
    return data


def _set_up(message: bytes) -> tuple[Solver | None, bytes]:
    """Load the solver and limit this process's memory; return the solver (None on an error) and the reply to send."""
    name, main_file, memory_bytes, pickled = pickle.loads(message)
    try:
        if main_file is not None:
            # Imported as `__mp_main__`, so code under `if __name__ == "__main__"` does not run.
            spawn.import_main_path(main_file)
        solver: Solver = pickle.loads(pickled)
    except (Exception, SystemExit) as error:
        return None, _fault(
            f"solver '{name}' cannot be loaded in a process of its own: "
            f"{type(error).__name__}: {error}",
            [],
        )
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    return solver, b"{}"


def _limit_memory(more: int) -> None:
    """Limit the address space of this process to its present size plus ``more`` bytes."""
    import resource

    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        mapped = 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _answer(solver: Solver, message: bytes) -> bytes:
    """Return the reply to one question: a parsed but unverified answer, a refusal, or an error."""
    try:
        with solver_errors(solver):
            method, problem, time_limit = pickle.loads(message)
            if method == "refuses":
                reason = solver.refuses(problem)
                return json.dumps({"reason": None if reason is None else str(reason)}).encode()
            answer = getattr(solver, method)(problem, time_limit=time_limit)
            claim = read(problem, solver, answer)
            status = None if claim.status is None else claim.status.value
            return json.dumps({**asdict(claim), "status": status}).encode()
    except BudgetError as error:
        return json.dumps({"over": str(error)}).encode()
    except (SolverError, MemoryError) as error:
        cause = error.__cause__ or error
        if not isinstance(cause, MemoryError):
            notes = ["".join(traceback.format_exception(cause))]
            return _fault(str(error), notes, refused=isinstance(error, RefusalError))
    # Out of memory. Reference cycles may hold memory that the next question needs.
    gc.collect()
    return _EXHAUSTED


def _fault(error: str, notes: list[str], *, refused: bool = False) -> bytes:
    return json.dumps({"error": error, "notes": notes, "refused": refused}).encode()
