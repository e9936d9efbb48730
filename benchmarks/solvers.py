"""Knapsack solvers side by side: remat's and their peers, on one grid, by one yardstick.

The workload ``grid``: families of Pisinger (2005) over R = 10^3, 10^5, 10^7 and n = 50, 300, 1,000, 10,000 at several seeds and
capacities; peers, which are slow, on a part of the grid. Each run has a second; a solver that is not back soon after
is killed. One row per family and solver: share of cells proven optimal and share feasible within the second, median and worst
time, worst gap to the best bound that any solver proved, and answers that did not fit. ``shared`` rows count only the cells
that all solvers faced.

``real``: the knapsacks of benchmarks/instances. ``memory``: peak memory of a process at 10,000 items.

PyTorch's four knapsack functions take part as solvers, called as PyTorch's partitioner calls them: sizes and room are shares
of the total.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import remat
from benchmarks.experiment import INSTANCES, Case, Experiment, Row, grid, in_process
from remat.errors import SolverError
from remat.plugins import isolated, registry
from remat.solvers import KnapsackProblem, Solver, Status, run
from remat.testing.families import FAMILIES, family
from tests.testing import mutants

LIMIT_S = 1.0
GRACE_S = 1.0
OURS = ("native", "auto", "dp", "greedy")
PEERS = ("cpsat", "milp", "pulp")


class TorchIlp(mutants.TorchIlp):  # type: ignore[misc]
    """Its answers may be above the capacity, so they prove nothing."""

    exact: ClassVar[bool] = False


class TorchHirschberg(mutants.FromTorch):  # type: ignore[misc]
    name, function = "torch-hirschberg", "dp_knapsack_sliding_hirschberg"


FROM_TORCH = (mutants.TorchGreedy, TorchIlp, mutants.TorchDp, TorchHirschberg)


def problems(quick: bool) -> Iterator[tuple[str, bool, KnapsackProblem]]:
    """The problems of the grid with their families, and whether the slow peers face them too."""
    sizes = (50, 300) if quick else (50, 300, 1_000, 10_000)
    spans = (10**3, 10**7) if quick else (10**3, 10**5, 10**7)
    draws = ((50, 1),) if quick else tuple((h, s) for h in (10, 50, 90) for s in (1, 2, 3))
    names = list(FAMILIES)[: 2 if quick else None]
    for name, items, span, (share, seed) in itertools.product(names, sizes, spans, draws):
        shared = seed == 1 and share == 50 and items <= 1_000 and span != 10**5
        yield name, shared, family(name, items=items, span=span, share=share, seed=seed)


def contestants() -> tuple[list[Solver], list[Solver]]:
    """remat's, in this process; peers, each in its own. A solver that is not installed is missing."""
    known = registry().solver_names()
    ours = [registry().solver(name) for name in OURS if name in known]
    others = [registry().solver(name) for name in PEERS if name in known]
    others += [kind() for kind in FROM_TORCH]
    peers = [isolated(solver, grace_s=GRACE_S) for solver in others]
    for solver in (*ours, *peers):
        warm_up(solver)
    return ours, peers


def warm_up(solver: Solver) -> None:
    """Lets it load its libraries before the clock runs."""
    with contextlib.suppress(SolverError):
        run(solver, family("weakly-correlated", items=40, span=1_000, share=50, seed=1))


def attempt(solver: Solver, problem: KnapsackProblem, limit_s: float | None = LIMIT_S) -> Row:
    """The answer of one solver to one problem; no value if none fits."""
    found: Row = {"side": solver.name, "value": None, "bound": None, "proven": False}
    start, reason = time.perf_counter(), None
    try:
        solution = run(solver, problem, time_limit=limit_s)
    except SolverError as error:
        reason = str(error)
    seconds = time.perf_counter() - start
    if reason is None:
        proven = solution.status is Status.OPTIMAL
        found |= {"value": solution.value, "bound": solution.bound, "proven": proven}
    else:
        warm_up(solver)  # it may have been killed
    return {**found, "seconds": seconds, "reason": reason}


def grid_rows(quick: bool) -> Iterator[Row]:
    ours, peers = contestants()
    answers: list[Row] = []
    for name, shared, problem in problems(quick):
        own = [attempt(solver, problem) for solver in (*ours, *(peers if shared else ()))]
        bounds = (answer["bound"] for answer in own if answer["bound"] is not None)
        bound = min((problem.relaxed().bound, *bounds))
        for answer in own:
            if answer["value"] is not None:
                answer["gap"] = (bound - answer["value"]) / max(1, bound)
            answers.append({**answer, "family": name, "shared": shared})
    for shared, name in itertools.product((False, True), (*FAMILIES, "all")):
        counted = [a for a in answers if a["shared"] >= shared and name in (a["family"], "all")]
        for solver in dict.fromkeys(answer["side"] for answer in answers):
            if mine := [answer for answer in counted if answer["side"] == solver]:
                yield {"side": solver, "shared": shared, "family": name, **figures(mine)}


def figures(mine: Sequence[Row]) -> Row:
    """The figures of one solver over some answers."""
    in_time = [answer for answer in mine if answer["seconds"] <= LIMIT_S * 1.05]
    return {
        "cells": len(mine),
        "proven": sum(answer["proven"] for answer in in_time) / len(mine),
        "feasible": sum(answer["value"] is not None for answer in in_time) / len(mine),
        "median_s": statistics.median(answer["seconds"] for answer in mine),
        "worst_s": max(answer["seconds"] for answer in mine),
        "worst_gap": max((answer["gap"] for answer in mine if "gap" in answer), default=None),
        "infeasible": sum("overweight" in (answer["reason"] or "") for answer in mine),
    }


def real_rows(quick: bool) -> Iterator[Row]:
    """Captured knapsacks, each at the capacity of its file: median of five runs of remat's, one of each peer."""
    ours, peers = contestants()
    for path in sorted(INSTANCES.glob("knapsack_*.json"))[: 1 if quick else None]:
        made = remat.load_instance(path)
        problem = made.problem
        name = f"{made.name} at {problem.capacity / max(1, problem.total_weight):.0%}"
        for solver in (*ours, *peers):
            # PyTorch's dp is given its time: the comparison is by how much.
            limit_s = None if solver.name.startswith("torch") else LIMIT_S
            runs = [attempt(solver, problem, limit_s) for _ in range(5 if solver in ours else 1)]
            seconds = statistics.median(answer["seconds"] for answer in runs)
            facts = {"instance": name, "items": len(problem), "seconds": seconds}
            yield {**runs[-1], **facts}


def peak_bytes() -> int:
    """Peak memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()  # ru_maxrss starts from the parent's
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024


def memory_of(name: str, kind: str) -> Iterator[Row]:
    problem = family(kind, items=10_000, span=10**7, share=50, seed=1)
    solver = registry().solver(name)
    run(solver, family(kind, items=100, span=1_000, share=50, seed=1))  # libraries are loaded then
    before = peak_bytes()
    run(solver, problem, time_limit=LIMIT_S)
    yield {"growth_bytes": peak_bytes() - before, "peak_bytes": peak_bytes()}


def memory_rows(quick: bool) -> Iterator[Row]:
    """Peak memory of a fresh process that solves 10,000 items, and its growth while solving."""
    names = [name for name in OURS if name in registry().solver_names()]
    for name in names[:1] if quick else names:
        for kind in ("uncorrelated", "strongly-correlated", "circle"):
            for row in in_process(memory_of, name, kind):
                yield {"side": name, "family": kind, **row}


PARTS = {"grid": grid_rows, "real": real_rows, "memory": memory_rows}


def measure(name: str, asked: Sequence[Case], quick: bool) -> Iterator[Row]:
    for row in PARTS[name](quick):
        yield {"workload": name, "budget": None, **row}


EXPERIMENTS = {
    "solvers": Experiment(
        about="knapsack solvers side by side, PyTorch's among them",
        cases=grid(PARTS, sides=("all",)),
        quick=grid(PARTS, sides=("all",)),
        measure=measure,
        summarise=lambda rows: {"limit_s": LIMIT_S},
        tables=("knapsacks",),
    ),
}
