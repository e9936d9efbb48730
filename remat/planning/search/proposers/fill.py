"""Change a candidate's decision: save more values within the limits, or repair a candidate above the limits."""

from __future__ import annotations

import random
from collections.abc import Callable

from remat.errors import ProblemError
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import Effort
from remat.planning.search.pool import Limits
from remat.planning.search.schedules import Schedules
from remat.solvers.graph.problem import worth_saving


def filled(
    schedules: Schedules,
    best: Candidate,
    limits: Limits,
    effort: Effort,
    spent: Callable[[], bool],
) -> Candidate:
    """Save values that a candidate recomputes, in descending order of cost per byte; return the resulting candidate.

    A value is saved if that lowers the cost within the limits. With a schedule problem from the caller, the search ends
    once ``effort.misses`` values in a row did not lower the cost.
    """
    failed = 0
    for i in worth_saving(schedules.problem, best.saved):
        if spent() or (failed == effort.misses and schedules.is_given):
            break
        candidate = schedules.candidate((*best.saved, i))
        is_better = not limits.excess(candidate) and candidate.cost < best.cost
        best, failed = (candidate, 0) if is_better else (best, failed + 1)
    return best


def repaired(
    schedules: Schedules, best: Candidate, limits: Limits, effort: Effort, spent: Callable[[], bool]
) -> Candidate:
    """Save or drop one or two random values at a time until a candidate is within the limits; return the result.

    A change that increases the bytes above the limits is undone. The search also ends after ``effort.draws`` changes
    per value, or when the evaluations are used up, so the result may exceed the limits. The random numbers have a fixed
    seed, so the result is deterministic.
    """
    # A fixed seed: equal graphs have equal plans on every rank.
    problem, draw = schedules.problem, random.Random(0)
    free = [i for i in range(len(problem)) if problem.savable[i] and problem.recomputable[i]]
    free = [i for i in free if problem.size[i]]
    for _ in range(effort.draws * len(free)):
        if spent() or not limits.excess(best):
            break
        some = {draw.choice(free)}
        if draw.random() < 0.5:
            some.add(draw.choice([i for i in free if i in best.saved] or free))
        try:
            candidate = schedules.candidate({*best.saved} ^ some)
        except ProblemError:
            # The dropped value cannot be recomputed: an input of it no longer exists.
            continue
        if limits.excess(candidate) <= limits.excess(best):
            best = candidate
    return best
