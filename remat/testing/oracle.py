"""Compute optima of small problems of each kind by enumeration, in integers of any size."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
from typing import Any

from remat.errors import ProblemError
from remat.solvers.graph.problem import Evaluation, GraphProblem, evaluate
from remat.solvers.problem import KnapsackProblem, Problem
from remat.solvers.schedule.problem import ScheduleProblem

MAX_ITEMS = 20


@functools.cache  # the tests of every solver need the same optima
def optimum(problem: Problem[Any]) -> int | None:
    """Return the best value or cost of a problem's answers within its capacity; None if no answer fits."""
    if isinstance(problem, KnapsackProblem):
        return brute_force(problem)
    if isinstance(problem, ScheduleProblem):
        return least_cost_schedule(problem)
    assert isinstance(problem, GraphProblem)
    room = math.inf if problem.capacity is None else problem.capacity
    fits = (e.recompute_cost for e in decisions(problem) if e.saved_bytes <= room)
    return min(fits, default=None)


def brute_force(problem: KnapsackProblem) -> int:
    """Return the greatest value of a knapsack within its capacity, by enumeration of all choices of items.

    Raises:
        ProblemError: there are more than 20 items.
    """
    if len(problem) > MAX_ITEMS:
        raise ProblemError(
            f"brute force takes at most {MAX_ITEMS} items, got {len(problem)}: "
            f"give the case an optimum that is known otherwise"
        )
    weights, values = [0], [0]
    for weight, value in zip(problem.weights, problem.values, strict=True):
        weights += [w + weight for w in weights]
        values += [v + value for v in values]
    return max(v for w, v in zip(weights, values, strict=True) if w <= problem.capacity)


def decisions(problem: GraphProblem) -> list[Evaluation]:
    """Return the saved bytes and the cost of every decision in a graph problem, whatever the capacity.

    A decision is a set of nodes to save. Sets of saved nodes from which backward cannot compute all
    values that it needs are left out.
    """
    may, evaluations = [i for i in range(len(problem)) if problem.savable[i]], []
    for picks in itertools.product((False, True), repeat=len(may)):
        with contextlib.suppress(ProblemError):
            evaluations.append(evaluate(problem, list(itertools.compress(may, picks))))
    return evaluations


def least_cost_schedule(problem: ScheduleProblem) -> int | None:
    """Return the least cost of a schedule within a problem's capacity; None if no schedule fits.

    The number of states grows as 4 to the power of the number of nodes, so the problem should have at
    most eight nodes.
    """
    capacity = math.inf if problem.capacity is None else problem.capacity
    makes, read = problem.results, problem.used
    runnable, size, inputs = problem.runnable, problem.size, problem.inputs
    once, backward, forward = set(problem.once), set(problem.backward), set(problem.forward)
    arriving = frozenset(i for i in problem.at_boundary if i in read)
    # A state is the values in memory, the nodes that have run, and whether backward has begun.
    # Dijkstra's algorithm: costs are not negative, so the first final state popped is cheapest.
    begin = (frozenset(i for i in problem.at_start if i in read), frozenset[int](), False)
    least = {begin: 0}
    queue: list[tuple[int, int, tuple[frozenset[int], frozenset[int], bool]]] = [(0, 0, begin)]
    ticket = itertools.count(1)  # breaks ties, so that heapq never compares states
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > least[state]:
            continue
        memory, ran, crossed = state
        if len(ran) == len(runnable) and set(problem.to_end) <= memory:
            return cost
        for v in runnable:
            if v in ran and v in once:
                continue
            crosses = v in backward and not crossed
            if crosses and not forward <= ran:
                continue
            if v not in ran and v in problem.ordered:
                place = problem.ordered.index(v)
                if not set(problem.ordered[:place]) <= ran:
                    continue
            there = memory | arriving if crosses else memory
            if not set(inputs[v]) <= there:
                continue
            largest = there | set(makes[v])
            # Before this run, every value that the run neither reads nor makes may be dropped.
            loose = [i for i in there if i not in inputs[v] and i not in makes[v]]
            for count in range(len(loose) + 1):
                for gone in itertools.combinations(loose, count):
                    alive = largest.difference(gone)
                    taken = problem.resident + problem.extra[v] + sum(size[i] for i in alive)
                    if taken > capacity:
                        continue
                    after = (frozenset(alive), ran | {v}, crossed or v in backward)
                    total = cost + problem.cost[v]
                    if total < least.get(after, math.inf):
                        least[after] = total
                        heapq.heappush(queue, (int(total), next(ticket), after))
    return None
