"""The step problem by simulated annealing over orders and further runs, in C++."""

from __future__ import annotations

import contextlib
import time
from types import ModuleType

from remat.errors import ProblemError
from remat.solvers.eviction import evicting
from remat.solvers.schedule_problem import ScheduleProblem, evaluate_schedule, not_found
from remat.solvers.solution import ScheduleAnswer
from remat.solvers.step_core import StepCore, step_core

#: Edits tried in one turn, for each node, and at most.
_MOVES, _MOST = 30_000, 10_000_000
#: Turns from the given order: hot and cold (in mean costs), margin below the capacity wide and narrow (in
#: shares), price of bytes too many. Two run at a time. Which one ends lowest differs from graph to graph.
_FRESH = (
    (1.0, 1e-3, 0.1, 0.01, 0.01),
    (3.0, 1e-2, 0.1, 0.01, 0.002),
    (1.0, 1e-3, 0.1, 0.01, 0.0005),
    (0.3, 1e-3, 0.2, 0.01, 0.01),
)
#: Turns from the best of those.
_AGAIN = ((0.3, 1e-3, 0.05, 0.005, 0.05), (0.1, 1e-3, 0.02, 0.002, 0.25))


def anneal(
    compiled: ModuleType,
    problem: ScheduleProblem,
    *,
    time_limit: float | None = None,
    effort: float = 1.0,
) -> ScheduleAnswer:
    """The cheapest schedule within the capacity that annealing finds.

    Every turn begins with all nodes once, or with a schedule that is known; the last ones with the best
    so far. Bytes over the capacity are a price, not a wall. The bound is that each node runs once.

    Args:
        compiled: the kernel.
        problem: what to solve.
        time_limit: seconds; None: only moves are counted.
        effort: share of the usual number of moves.

    Raises:
        BudgetError: no schedule within the capacity was found.
    """
    core = step_core(problem)
    least = sum(problem.cost)
    best, done = _first(problem, core)
    fits = problem.capacity is None or done.peak_bytes <= problem.capacity
    if fits and done.cost == least:
        return ScheduleAnswer(core.lifted(best), least)
    graph = compiled.StepGraph(*core.columns())
    capacity = core.capacity >> core.shift
    deadline = None if time_limit is None else time.monotonic() + time_limit
    moves = min(_MOST, int(effort * _MOVES * len(problem)) + 1_000)
    peak, cost, by_clock = done.peak_bytes, done.cost, False
    start = best
    for rows in (_FRESH[:2], _FRESH[2:], _AGAIN):
        left = 0.0 if deadline is None else max(0.001, deadline - time.monotonic())
        turns = [(seed, moves, *row) for seed, row in enumerate(rows, 1)]
        start = best if rows is _AGAIN else start
        for _, clock, _, _, sequence in graph.anneal(start, capacity, turns, left):
            by_clock |= clock
            found = evaluate_schedule(problem, core.lifted(sequence))
            within = problem.capacity is None or found.peak_bytes <= problem.capacity
            better = (not within, found.cost if within else found.peak_bytes) < (
                not fits,
                cost if fits else peak,
            )
            if better:
                best, fits = tuple(sequence), within
                cost, peak = found.cost, found.peak_bytes
        if (fits and cost == least) or by_clock:
            break
    if not fits:
        raise not_found(problem, peak)
    return ScheduleAnswer(core.lifted(best), least, by_clock=by_clock)


def _first(problem: ScheduleProblem, core: StepCore):  # type: ignore[no-untyped-def]
    """The cheapest known schedule that fits, the least peak if none does; every node once is known."""
    order = core.lifted(core.start)
    sequences = [core.start]
    for known in (*problem.known, evicting(problem, order) or order):
        with contextlib.suppress(ProblemError):  # a known one that cannot run helps nobody
            evaluate_schedule(problem, known)
            sequences.append(core.placed(problem, known))

    def rank(sequence: tuple[int, ...]) -> tuple[bool, int, int]:
        done = evaluate_schedule(problem, core.lifted(sequence))
        over = problem.capacity is not None and done.peak_bytes > problem.capacity
        return over, done.peak_bytes if over else done.cost, done.peak_bytes

    best = min(sequences, key=rank)
    return best, evaluate_schedule(problem, core.lifted(best))
