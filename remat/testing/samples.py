"""Draw random problems for the conformance suite: knapsacks, graph problems and schedule problems."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from remat.errors import BudgetError
from remat.solvers.base import Solver
from remat.solvers.problem import KnapsackProblem, Problem
from remat.solvers.run import run
from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule, least_peak
from remat.testing import graphs, steps
from remat.testing.families import FAMILIES, family
from remat.testing.oracle import decisions


def refusal(solver: Solver, problem: Problem[Any]) -> str | None:
    """Return why a solver refuses a knapsack; None if it accepts the problem, or the problem is no knapsack."""
    return solver.refuses(problem) if isinstance(problem, KnapsackProblem) else None


def solved(solver: Solver, problem: Problem[Any], *, time_limit: float | None = None) -> Any:
    """Return the verified solution of a problem, or None if the solver found no schedule within the capacity.

    If the solver refuses the problem, the current test is skipped.
    """
    reason = refusal(solver, problem)
    if reason is not None:
        pytest.skip(f"solver '{solver.name}' refuses: {reason}")
    try:
        return run(solver, problem, time_limit=time_limit)
    except BudgetError:
        if isinstance(problem, ScheduleProblem):
            return None
        raise


@dataclass(frozen=True, slots=True)
class Sample:
    """A set of problems of one kind, which a test gives to a solver one after another.

    Attributes:
        name: name shown in test ids.
        kind: the kind of all problems in the sample: ``"knapsack"``, ``"graph"`` or ``"schedule"``.
        draw: a function that draws the problems; every call draws the same problems.
    """

    name: str
    kind: str
    draw: Callable[[], Iterable[Problem[Any]]]


def _small_knapsacks(name: str) -> Iterator[Problem[Any]]:
    """Yield 20 small knapsacks of the family ``name``, from a tight to a loose capacity."""
    for seed in range(20):
        yield family(name, items=1 + seed % 10, span=30, share=5 * seed + 3, seed=seed)


def _small_graphs(block: int) -> Iterator[Problem[Any]]:
    """Yield small random graph problems, one for each of 30 seeds; at least one decision fits each capacity."""
    draw = random.Random(block)
    for seed in range(30 * block, 30 * block + 30):
        problem = graphs.random_graph(seed, nodes=9)
        sizes = [e.saved_bytes for e in decisions(problem)]
        if sizes:
            yield problem.within(draw.randint(min(sizes), max(sizes) + 1))


def _small_schedules(block: int) -> Iterator[Problem[Any]]:
    """Yield small random schedule problems, one for each of 25 seeds; a capacity may be too small for any schedule."""
    draw = random.Random(block)
    for seed in range(25 * block, 25 * block + 25):
        problem = steps.random_schedule_problem(seed, nodes=5, plain=seed % 3 == 0)
        # No schedule fits the smallest capacity. The largest is the peak of the problem's own order.
        yield problem.within(draw.randint(max(0, least_peak(problem)[0] - 1), _own_peak(problem)))


#: Problems small enough to find their optima by enumeration.
SMALL = (
    *(Sample(name, "knapsack", functools.partial(_small_knapsacks, name)) for name in FAMILIES),
    *(Sample(f"graphs-{k}", "graph", functools.partial(_small_graphs, k)) for k in range(4)),
    *(Sample(f"steps-{k}", "schedule", functools.partial(_small_schedules, k)) for k in range(4)),
)


def _plain_knapsacks() -> Iterator[Problem[Any]]:
    yield from (family(name, items=40, span=300, share=45, seed=7) for name in FAMILIES)
    yield family("weakly-correlated", items=60, span=10**7, share=50, seed=6)
    yield family("strongly-correlated", items=60, span=10_000, share=50, seed=5)


def _plain_graphs() -> Iterator[Problem[Any]]:
    graph = graphs.layers(10)
    for share in (0.1, 0.3, 0.5, 0.8):
        yield graph.within(int(share * sum(graph.size)))


def _tight_schedule(nodes: int, seed: int) -> Iterator[Problem[Any]]:
    step = steps.layered(nodes, width=0.3, seed=seed)
    yield step.within(_own_peak(step) * 9 // 10)


#: Problems that take milliseconds, with capacities that rule out saving everything.
PLAIN = (
    Sample("knapsack", "knapsack", _plain_knapsacks),
    Sample("graph", "graph", _plain_graphs),
    Sample("schedule", "schedule", lambda: _tight_schedule(30, 2)),
)


def _hard_knapsack(name: str) -> Iterator[Problem[Any]]:
    yield family(name, items=2_000, span=10**7, share=50, seed=8)


def _wide_graph() -> Iterator[Problem[Any]]:
    graph = graphs.wide(200)
    yield graph.within(sum(graph.size) // 3)


#: Problems that take a solver minutes, unless a clock or a limit on its work ends the search.
HARD = (
    *(
        Sample(name, "knapsack", functools.partial(_hard_knapsack, name))
        for name in ("strongly-correlated", "circle")
    ),
    Sample("wide-graph", "graph", _wide_graph),
    Sample("layered-step", "schedule", lambda: _tight_schedule(250, 3)),
)


def _roomy_schedules() -> Iterator[Problem[Any]]:
    for seed in range(20):
        step = steps.random_schedule_problem(seed)
        yield from (step.within(room) for room in (None, _own_peak(step)))


#: Problems whose capacity suffices to save all values, so that no node has to run again.
ROOMY = (
    Sample("graph", "graph", lambda: (graphs.layers(5),)),
    Sample("schedule", "schedule", _roomy_schedules),
)


def _own_peak(step: ScheduleProblem) -> int:
    """Return the peak in bytes of the schedule that runs each node of a schedule problem once, in order."""
    return evaluate_schedule(step, step.order).peak_bytes
