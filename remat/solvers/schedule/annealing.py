"""Solve schedule problems (see `ScheduleProblem`) with the compiled C++ kernel's simulated annealing.

A schedule is a sequence of runs of nodes. One edit moves a run, or adds or removes a second or later
run of a node. A *turn* is one annealing search of the kernel, with a given number of edits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from remat.errors import ProblemError
from remat.solvers.effort import EFFORT
from remat.solvers.kernel import required
from remat.solvers.schedule.core import ScheduleCore, schedule_core
from remat.solvers.schedule.eviction import evicting
from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule, not_found
from remat.solvers.solution import ScheduleAnswer

#: The turns that start from the best known schedule; one row of numbers for each turn. A row has the
#: first and last temperature, in mean costs of a node, and the first and last margin. Bytes are
#: penalised from this margin below the capacity on; margins are fractions of the capacity. The last
#: number is the first price of excess bytes: the price of a mean node's bytes, in mean costs of a
#: node. The kernel runs two turns at a time. Several turns are needed: none is best on every graph.
_FRESH = (
    (1.0, 1e-3, 0.1, 0.01, 0.01),
    (3.0, 1e-2, 0.1, 0.01, 0.002),
    (1.0, 1e-3, 0.1, 0.01, 0.0005),
    (0.3, 1e-3, 0.2, 0.01, 0.01),
)
#: The turns that start from the best schedule that `_FRESH` found; the same columns.
_AGAIN = ((0.3, 1e-3, 0.05, 0.005, 0.05), (0.1, 1e-3, 0.02, 0.002, 0.25))
#: The turns of `improve`, which start from a nearly feasible schedule; the same columns. Their
#: temperatures are lower, so that the search stays near this schedule.
_NEAR = ((0.5, 1e-3, 0.05, 0.002, 0.05), (0.1, 1e-3, 0.02, 0.002, 0.25))


def anneal(problem: ScheduleProblem, *, time_limit: float | None = None) -> ScheduleAnswer:
    """Return the cheapest schedule within the capacity that simulated annealing finds.

    The first searches start from the best of these schedules: every node once, the schedule from
    `evicting`, and those in ``problem.hints``. The last searches start from the best schedule found so
    far. During a search, a schedule may exceed the capacity, but excess bytes add a penalty to its cost.
    The answer's bound is the cost of running each node once.

    Raises:
        BudgetError: no schedule within the capacity was found.
    """
    core = schedule_core(problem)
    least = sum(problem.cost)

    def rank(sequence: Sequence[int]) -> tuple[bool, int, int]:
        return _rank(problem, core.invert(sequence)[0])

    start = best = min(_starts(problem, core), key=rank)
    by_clock = False
    # A schedule within the capacity that runs each node once is optimal: no search is needed.
    if rank(best)[:2] != (False, least):
        graph = required().ScheduleGraph(*core.columns())
        capacity = core.capacity >> core.shift
        deadline = None if time_limit is None else time.monotonic() + time_limit
        moves = min(EFFORT.most_moves, EFFORT.moves * len(problem) + 1_000)
        for rows in (_FRESH[:2], _FRESH[2:], _AGAIN):
            # The kernel takes 0 seconds as "no clock", so a time limit that has passed becomes 1 ms.
            left = 0.0 if deadline is None else max(0.001, deadline - time.monotonic())
            turns = [(seed, moves, *row) for seed, row in enumerate(rows, 1)]
            results = graph.anneal(best if rows is _AGAIN else start, capacity, turns, left)
            by_clock = any(clock for _, clock, *_ in results)
            best = min((best, *(tuple(sequence) for *_, sequence in results)), key=rank)
            # If the clock ended a turn, no time is left for the next turns.
            if rank(best)[:2] == (False, least) or by_clock:
                break
    over, _, peak = rank(best)
    if over:
        raise not_found(problem, peak)
    return ScheduleAnswer(core.invert(best)[0], least, by_clock=by_clock)


def improve(
    problem: ScheduleProblem, sequence: Sequence[int], boundary: int, *, moves: int
) -> list[tuple[tuple[int, ...], int]]:
    """Lower the cost of a schedule that fits the capacity, or the peak of a schedule that exceeds the capacity.

    Returns:
        Pairs, best first: the given schedule and the best schedule of each search, each with the
        position at which backward begins. Backward begins at the earliest legal position, unless the
        schedule would then exceed the capacity. Returned schedules may exceed the capacity.
    """
    core = schedule_core(problem)
    best = (tuple(sequence), boundary)
    graph = required().ScheduleGraph(*core.columns())
    turns = [(seed, moves, *row) for seed, row in enumerate(_NEAR, 1)]
    start = core.apply(problem, *best)
    annealed = graph.anneal(start, core.capacity >> core.shift, turns, 0.0)
    candidates = {best, *(core.invert(s) for *_, s in annealed)}

    def with_boundary(sequence: tuple[int, ...], boundary: int) -> tuple[tuple[int, ...], int]:
        begun = {v: position for position, v in reversed([*enumerate(sequence)])}
        first = max((begun[v] + 1 for v in problem.forward), default=0)
        fits = first < boundary and not _rank(problem, sequence, first)[0]
        return sequence, first if fits else boundary

    schedules = {with_boundary(*candidate) for candidate in candidates}
    return sorted(schedules, key=lambda candidate: (_rank(problem, *candidate), candidate))


def _rank(
    problem: ScheduleProblem, runs: Sequence[int], boundary: int | None = None
) -> tuple[bool, int, int]:
    """Return a sort key: ``(False, cost, peak)`` for a schedule within the capacity, else ``(True, peak, peak)``."""
    evaluation = evaluate_schedule(problem, runs, boundary)
    over = problem.capacity is not None and evaluation.peak_bytes > problem.capacity
    return over, evaluation.peak_bytes if over else evaluation.cost, evaluation.peak_bytes


def _starts(problem: ScheduleProblem, core: ScheduleCore) -> list[tuple[int, ...]]:
    """Return the legal schedules from which annealing may start, as sequences of nodes of ``core``."""
    evicted = evicting(problem)
    starts = [core.start]
    for hint in (*problem.hints, *((evicted,) if evicted else ())):
        with contextlib.suppress(ProblemError):  # `hint` is unchecked: it may be no legal schedule
            evaluate_schedule(problem, hint)
            starts.append(core.apply(problem, hint))
    return starts
