"""Solvers that misbehave, at the top of a module so that another process can import them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from remat.errors import RefusalError
from remat.solvers import Answer, Solver, Status


class Honest(Solver):
    """Takes what fits, in order."""

    name = "honest"

    def solve(self, problem, *, time_limit=None):
        saved, room = [], problem.capacity
        for i, weight in enumerate(problem.weights):
            if weight <= room:
                saved.append(i)
                room -= weight
        return saved


@dataclass(frozen=True, slots=True, repr=False)
class Configured(Solver):
    """Saves one item, which one is an option."""

    item: int = 0
    name = "configured"

    def solve(self, problem, **kwargs):
        return Answer([self.item], problem.total_value)


class ClaimsAll(Solver):
    """Says that one item is worth as much as all."""

    name = "claims-all"

    def solve(self, problem, **kwargs):
        return Answer([0], value=problem.total_value, status=Status.OPTIMAL)


class Identified(Honest):
    """Leaves the number of its process where a test finds it."""

    name = "identified"

    def solve(self, problem, **kwargs):
        with open(os.environ["REMAT_TEST_PIDS"], "a") as file:
            file.write(f"{os.getpid()}\n")
        return []


class Raises(Honest):
    name = "raises"

    def solve(self, problem, **kwargs):
        raise ValueError("no luck")


class RaisesInRefuses(Honest):
    name = "raises-in-refuses"

    def refuses(self, problem):
        raise KeyError("size")


class Refuses(Honest):
    name = "refuses"

    def refuses(self, problem):
        return "not today"


class Hangs(Honest):
    name = "hangs"

    def solve(self, problem, **kwargs):
        while True:
            time.sleep(60)


class HangsWithChild(Honest):
    """Starts a process of its own, says its number, and hangs."""

    name = "hangs-with-child"

    def solve(self, problem, **kwargs):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ["REMAT_TEST_PIDS"], "w") as file:
            file.write(str(child.pid))
        child.wait()


class Exits(Honest):
    name = "exits"

    def solve(self, problem, **kwargs):
        print("about to leave", flush=True)
        os._exit(7)


class ExitsOrderly(Honest):
    name = "exits-orderly"

    def solve(self, problem, **kwargs):
        sys.exit(3)


class Segfaults(Honest):
    name = "segfaults"

    def solve(self, problem, **kwargs):
        ctypes.string_at(0)


class EatsMemory(Honest):
    name = "eats-memory"

    def solve(self, problem, **kwargs):
        eaten = []
        while True:
            eaten.append(bytearray(2**24))


class Prints(Honest):
    name = "prints"

    def solve(self, problem, **kwargs):
        print("x" * 100_000)
        os.write(1, b"from C\n")
        os.write(2, b"to stderr\n")
        return super().solve(problem)


class Overweight(Honest):
    name = "overweight"

    def solve(self, problem, **kwargs):
        return range(len(problem))


class Declines(Honest):
    name = "declines"

    def solve(self, problem, **kwargs):
        raise RefusalError(self.name, "too small for me")


class FailsToLoad(Honest):
    """Unpickles badly: only the other process notices."""

    name = "fails-to-load"

    def __setstate__(self, state):
        raise RuntimeError("no licence")

    def __getstate__(self):
        return {"some": "state"}
