"""A portfolio: the cheap proof first, then the strong searches, the best of all answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from remat.errors import SolverError
from remat.solvers.base import Solver, unavailable
from remat.solvers.cpsat import CpSat
from remat.solvers.dp import DynamicProgram
from remat.solvers.greedy import Greedy
from remat.solvers.milp import Milp
from remat.solvers.native import Native
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import ReducingSolver
from remat.solvers.run import run
from remat.solvers.solution import Answer, Solution

_TABLE_CELLS = 50_000_000  # items times capacities that dynamic programming fills in a blink


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Auto(ReducingSolver):
    """A portfolio of the other solvers; the best answer and the best bound of all.

    The compiled kernel comes first: it proves nearly everything in milliseconds. Every member's answer is checked like anyone's. A member that is missing, fails or is refused
    is passed over; greedy, which cannot fail, is the floor. Without a time limit all members
    count their work, so that the answer repeats.
    """

    name: ClassVar[str] = "auto"

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Ask one member after the other until the best answer meets the best bound."""
        deadline = None if time_limit is None else time.monotonic() + time_limit
        best = run(Greedy(), core)
        bound, by_clock = best.bound, False
        for member, share in _members(core):
            if best.value == bound:
                break
            limit = None
            if deadline is not None:
                limit = (deadline - time.monotonic()) * share
                if limit <= 0:
                    by_clock = True
                    break
            solution = _try(member, core, limit)
            if solution is not None:
                best = max(best, solution, key=_rank)
                bound = min(bound, solution.bound)
                by_clock |= not solution.deterministic
        return Answer(best.saved, bound, by_clock=by_clock)


def _members(core: KnapsackProblem) -> Iterator[tuple[Solver, float]]:
    """Whom to ask, in order, and for what share of the time that is left then."""
    yield Native(), 0.6
    if len(core) * core.capacity <= _TABLE_CELLS:
        yield DynamicProgram(steps=core.capacity), 1.0
    yield CpSat(work=2.0), 0.5
    yield Milp(nodes=200), 0.8
    yield DynamicProgram(), 1.0


def _try(member: Solver, core: KnapsackProblem, limit: float | None) -> Solution | None:
    if unavailable(type(member)) is not None:
        return None
    try:
        return run(member, core, time_limit=limit)
    except SolverError:
        return None


def _rank(solution: Solution) -> tuple[int, int]:
    return solution.value, -solution.weight
