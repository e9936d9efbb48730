"""Propose decisions similar to a candidate: save more values, exchange saved values, or drop bytes above the limits."""

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
    *,
    orders: bool,
) -> Candidate:
    """Lower the cost of a candidate within the limits; return the resulting candidate.

    In a first stage, values that were recomputed are saved, in descending order of cost per byte. In a second stage,
    saved values are exchanged for values that cost more to recompute. Both stages are repeated until the cost no longer
    falls. If node orders can be searched, no values are exchanged, because a search over node orders lowers the cost
    further. If the caller gave the schedule problem, saving ends after ``effort.misses`` values in a row whose saving
    does not lower the cost.
    """
    problem = schedules.problem

    def better(saved: tuple[int, ...]) -> bool:
        nonlocal best
        try:
            candidate = schedules.candidate(saved)
        except ProblemError:
            # The dropped value cannot be recomputed: an input of it no longer exists.
            return False
        if limits.excess(candidate) or candidate.cost >= best.cost:
            return False
        best = candidate
        return True

    while True:
        before = best
        unsaved = worth_saving(problem, best.saved)
        failed = 0
        for i in unsaved:
            if spent():
                return best
            failed = 0 if better((*best.saved, i)) else failed + 1
            if failed == effort.misses and schedules.is_given:
                break
        if orders:
            return best
        if best is not before:
            continue
        held = [i for i in best.saved if problem.size[i] and problem.recomputable[i]]
        held.sort(key=lambda i: (problem.cost[i] / (1 + problem.size[i]), i))
        for i, j in ((i, j) for i in unsaved for j in held if problem.cost[j] < problem.cost[i]):
            if spent():
                return best
            if better((*(k for k in best.saved if k != j), i)):
                break
        if best is before:
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
