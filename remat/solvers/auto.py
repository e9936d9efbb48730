"""The portfolio solver: runs other solvers, the cheapest first, and returns the best answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
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
from remat.solvers.knapsack.reduction import reduce
from remat.solvers.problem import KnapsackProblem
from remat.solvers.run import run
from remat.solvers.schedule.problem import ScheduleProblem
from remat.solvers.solution import Answer, ScheduleAnswer, Solution, Status
from remat.solvers.verify import verify


class Auto(Solver):
    """Portfolio of the other solvers, which returns their best answer with their tightest bound.

    The compiled kernel runs first, because it proves nearly every optimum in milliseconds. A solver that
    is not installed, fails, refuses the problem, or returns a wrong answer is skipped. Without a time
    limit, solvers' limits count operations instead of seconds, so every run returns the same answer.
    """

    __slots__ = ()

    name: ClassVar[str] = "auto"

    def solve(self, problem: KnapsackProblem, *, time_limit: float | None = None) -> Answer:
        """Run solvers on a knapsack, one after another, until the best value equals the tightest upper bound."""
        deadline = None if time_limit is None else time.monotonic() + time_limit
        # If the kernel does not prove an optimum, the other solvers need the rest of the time.
        answer = _kernel_answer(problem, None if time_limit is None else 0.6 * time_limit)
        if answer is not None and answer.status is Status.OPTIMAL:
            return answer  # not verified here: `run` verifies the answer of `Auto` itself
        first = None
        if answer is not None:
            with contextlib.suppress(SolverError):
                first = verify(problem, Native(), answer)
        reduction = reduce(problem)
        if not reduction.remaining:
            return reduction.invert_answer(Answer((), 0))
        members = _members(reduction.core, again=first is None)
        others = reduction.invert_answer(_best(reduction.core, members, deadline))
        if first is None:
            return others
        bound = first.bound if others.bound is None else min(first.bound, others.bound)
        ranks = (first.value, problem.value_of(others.saved))
        return Answer(
            first.saved if ranks[0] >= ranks[1] else others.saved,
            bound,
            by_clock=others.by_clock or not first.deterministic,
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
        """Solve a schedule problem with the kernel, with CP-SAT if the kernel cannot run, or else with `Greedy`."""
        if unavailable(Native) is None:
            return Native().solve_schedule(problem, time_limit=time_limit)
        if unavailable(CpSat) is None:
            with contextlib.suppress(RefusalError):
                return CpSat().solve_schedule(problem, time_limit=time_limit)
        return ScheduleAnswer(Greedy().solve_schedule(problem))


def _kernel_answer(problem: KnapsackProblem, limit: float | None) -> Answer | None:
    """Return the kernel's unverified answer to a knapsack; None if the kernel cannot run, refuses or fails."""
    native = Native()
    if native.cannot_run() is not None or native.refuses(problem) is not None:
        return None
    try:
        return native.solve(problem, time_limit=limit)
    except Exception:  # other solvers can still answer
        return None


def _best(
    core: KnapsackProblem, members: Iterable[tuple[Solver, float]], deadline: float | None
) -> Answer:
    """Run solvers until one proves the optimum or the deadline passes; return the best choice and the lowest bound."""
    best = run(Greedy(), core)  # answers every knapsack, so there is always a result
    bound, by_clock = best.bound, False
    for member, share in members:
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
            best = max(best, solution, key=lambda s: (s.value, -s.weight))
            bound = min(bound, solution.bound)
            by_clock |= not solution.deterministic
    return Answer(best.saved, bound, by_clock=by_clock)


def _members(core: KnapsackProblem, *, again: bool) -> Iterator[tuple[Solver, float]]:
    """Yield the solvers that `Auto` runs on a knapsack, in order, each with its fraction of the remaining time."""
    if again:
        yield Native(), 0.6
    # With one step per unit of capacity, the dynamic program is exact.
    if len(core) * core.capacity <= EFFORT.table_cells:
        yield DynamicProgram(steps=core.capacity), 1.0
    if len(core) <= EFFORT.items:
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


def is_auto(solver: Solver) -> bool:
    """Return whether a solver is `Auto`, or an `Isolated` solver that runs `Auto`."""
    # Compare names: an `Isolated` solver has the name of the solver that it runs, but another class.
    return solver.name == Auto.name
