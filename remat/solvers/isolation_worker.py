"""What runs inside a solver's own process; the other end is in `remat.solvers.isolation`.

Standard output and error belong to the solver. Questions come and replies go through two pipes, one
length-prefixed message each; a question is trusted and pickled, a reply is JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import runpy
import signal
import struct
import sys
import traceback
import types
from typing import Any

from remat.errors import SolverError
from remat.solvers.base import Solver
from remat.solvers.run import run
from remat.solvers.run_graph import run_graph

_EXHAUSTED = json.dumps({"exhausted": True}).encode()  # ready before there is no memory left
_ORPHAN_S = 30.0


def main(requests: int, replies: int) -> None:
    """Set up the solver, then answer questions until the other side goes away."""
    for fd in (requests, replies):
        os.set_inheritable(fd, False)  # what the solver starts must not hold them open
    faulthandler.enable()
    message = _receive(requests)
    if message is None:
        return
    solver, reply = _set_up(message)
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply)
        message = _receive(requests)
        if message is None or solver is None:
            return
        reply = _answer(solver, message)


def _set_up(message: bytes) -> tuple[Solver | None, bytes]:
    head, _, pickled = message.partition(b"\n")
    setup = json.loads(head)
    try:
        if setup["main"] is not None:
            _load_main(setup["main"])
        solver: Solver = pickle.loads(pickled)
    except (Exception, SystemExit) as error:
        return None, _fault(
            f"solver '{setup['name']}' cannot be loaded in a process of its own: "
            f"{type(error).__name__}: {error}"
        )
    if setup["memory_bytes"] is not None:
        _limit_memory(setup["memory_bytes"])
    return solver, b"{}"


def _load_main(path: str) -> None:
    """Load the script whose classes are wanted, as multiprocessing does, without running it."""
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _limit_memory(more: int) -> None:
    """Allow so many bytes of address space beyond what is mapped now."""
    import resource

    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux
        mapped = 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _answer(solver: Solver, message: bytes) -> bytes:
    try:
        what, problem, time_limit = pickle.loads(message)
        if what == "refuses":
            return json.dumps({"reason": _text(solver.refuses(problem))}).encode()
        ask: Any = run_graph if what == "solve_graph" else run
        solution = ask(solver, problem, time_limit=time_limit)
        claimed = solution.claimed_bound
        reply: dict[str, Any] = {
            "saved": solution.saved,
            "bound": solution.bound if claimed is None else claimed,
            "by_clock": solver.deterministic and not solution.deterministic,
        }
        return json.dumps(reply).encode()
    except MemoryError:
        pass
    except SolverError as error:
        cause = error.__cause__
        if not isinstance(cause, MemoryError):
            notes = [] if cause is None else ["".join(traceback.format_exception(cause))]
            return _fault(str(error), notes)
    except (Exception, SystemExit) as error:
        name = type(error).__name__
        notes = ["".join(traceback.format_exception(error))]
        return _fault(f"solver '{solver.name}' raised {name}: {error}", notes)
    gc.collect()
    return _EXHAUSTED


def _text(reason: object) -> str | None:
    return None if reason is None else str(reason)


def _fault(error: str, notes: list[str] | None = None) -> bytes:
    return json.dumps({"error": error, "notes": notes or []}).encode()


def _receive(fd: int) -> bytes | None:
    """The next message, or None if the other side is gone. Arms the alarm that ends an orphan."""
    head = _read(fd, 16)
    if head is None:
        return None
    length, within_s = struct.unpack("<Qd", head)
    if within_s:  # the kernel ends the process, even one that hangs in C, should the parent not
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, within_s + _ORPHAN_S)
    return _read(fd, length)


def _read(fd: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = os.read(fd, min(count - len(data), 2**20))
        if not part:
            return None
        data += part
    return bytes(data)


def _send(fd: int, reply: bytes) -> None:
    view = memoryview(struct.pack("<Q", len(reply)) + reply)
    while view:
        view = view[os.write(fd, view) :]
