"""Run a portfolio of solvers on a problem, the cheapest solver first, and return the best answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import ClassVar

from remat.errors import RefusalError, SolverError
from remat.solvers.base import Solver, unavailable
from remat.solvers.effort import EFFORT
from remat.solvers.graph.lagrangian import Search
from remat.solvers.graph.milp import GraphMilp
from remat.solvers.graph.problem import GraphProblem
from remat.solvers.knapsack.cpsat import CpSat
from remat.solvers.knapsack.dp import DynamicProgram
from remat.solvers.knapsack.greedy import Greedy
from remat.solvers.knapsack.milp import Milp
from remat.solvers.knapsack.native import Native
from remat.solvers.knapsack.reduction import CoreSolver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run
from remat.solvers.schedule.problem import ScheduleProblem
from remat.solvers.solution import Answer, ScheduleAnswer, Solution


class Auto(CoreSolver):
    """Portfolio that runs the other solvers, and returns their best answer with their tightest bound.

    The compiled kernel runs first, because it proves nearly every optimum in milliseconds. A solver that
    is not installed, fails, refuses the problem, or returns a wrong answer is skipped. Without a time
    limit, solvers' limits count operations instead of seconds, so every run returns the same answer.
    """

    __slots__ = ()

    name: ClassVar[str] = "auto"

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Run solvers on a knapsack, one after another, until the best value equals the tightest upper bound."""
        deadline = None if time_limit is None else time.monotonic() + time_limit
        solutions: list[Solution] = []
        late = False
        for member, share in _members(core):
            if solutions and _best(solutions).value == min(s.bound for s in solutions):
                break
            left = None if deadline is None else deadline - time.monotonic()
            late = bool(solutions) and left is not None and left <= 0
            if late:
                break
            if unavailable(type(member)) is None:
                limit = None if left is None else max(1e-3, share * left)
                with contextlib.suppress(SolverError):
                    solutions.append(run(member, core, time_limit=limit))
        return Answer(
            _best(solutions).saved,
            min(s.bound for s in solutions),
            by_clock=late or not all(s.deterministic for s in solutions),
        )

    def solve_graph(self, problem: GraphProblem, *, time_limit: float | None = None) -> Answer:
        """Solve a graph problem in rounds, each with a higher limit on work, and return the best answer.

        A round runs a beam search, the kernel's exact enumeration, and HiGHS. The rounds end early if the
        gap between cost and bound is at most 0.1 % of the cost.
        """
        # The kernel is fast if few values are alive at a time, and HiGHS if many are. On the wrong kind of graph,
        # either solver takes a hundred times as long, so the first rounds are short. HiGHS cannot be interrupted at the
        # root of its search tree, so rounds that allow less work than the root needs leave HiGHS out.
        search = Search(problem, time_limit=time_limit)
        # All solvers share one `Search`, so the hull is computed once.
        with_highs, best = unavailable(GraphMilp) is None, search.start()
        root = EFFORT.root_work * (len(search.core) + sum(map(len, search.core.inputs)))
        for most, work in (
            (*EFFORT.turns, EFFORT.long_turn) if len(problem) > EFFORT.large else EFFORT.turns
        ):
            best = search.repair(best, most=most)
            best = search.exact(best, work=2 * work)
            if best.gap > EFFORT.gap and with_highs and root <= 10 * work:
                nodes = max(20, 80 * work // max(1, root))
                best = GraphMilp(nodes=nodes, gap=0.9 * EFFORT.gap).improve(search, best)
            if best.gap <= EFFORT.gap or search.late():
                break
        return search.answer(best)

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> ScheduleAnswer:
        """Solve a schedule problem with the first of these solvers that can run: the kernel, CP-SAT, `Greedy`."""
        if unavailable(Native) is None:
            return Native().solve_schedule(problem, time_limit=time_limit)
        if unavailable(CpSat) is None:
            with contextlib.suppress(RefusalError):
                return CpSat().solve_schedule(problem, time_limit=time_limit)
        return ScheduleAnswer(Greedy().solve_schedule(problem))


def _members(core: KnapsackProblem) -> Iterator[tuple[Solver, float]]:
    """Yield the solvers that `Auto` runs on a knapsack, in order, each with its fraction of the remaining time."""
    # If the kernel does not prove an optimum, the other solvers need the rest of the time.
    yield Native(), 0.6
    yield Greedy(), 1.0  # answers every knapsack, so there is always a result
    # With one step per unit of capacity, the dynamic program is exact.
    if len(core) * core.capacity <= EFFORT.table_cells:
        yield DynamicProgram(steps=core.capacity), 1.0
    if len(core) <= EFFORT.items:
        yield CpSat(work=2.0), 0.5
        yield Milp(nodes=200), 0.8
    yield DynamicProgram(), 1.0


def _best(solutions: list[Solution]) -> Solution:
    """Return the solution of greatest value; if several have this value, the lightest of them."""
    return max(solutions, key=lambda s: (s.value, -s.weight))


def is_auto(solver: Solver) -> bool:
    """Return whether a solver is the portfolio solver `Auto`, or runs `Auto` in another process."""
    # Compare names: an `Isolated` solver has the name of the solver that it runs, but another class.
    return solver.name == Auto.name
