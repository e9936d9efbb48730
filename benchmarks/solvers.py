"""Knapsack solvers side by side: remat's and their peers, on one grid, by one yardstick.

The workload ``grid``: families of Pisinger (2005) over R = 10^3, 10^5, 10^7 and n = 50, 300, 1,000, 10,000 at several seeds and
capacities; peers, which are slow, on a part of the grid. Each run has a second; a solver that is not back soon after
is killed. One row per family and solver: share of cells proven optimal and share feasible within the second, median and worst
time, worst gap to the best bound that any solver proved, and answers that did not fit. ``shared`` rows count only the cells
that all solvers faced.

``real``: the knapsacks of benchmarks/instances. ``memory``: peak memory of a process at 10,000 items. The kept results have a part
``random`` too: 100,000 random problems against dynamic programming. The conformance kit does that now.

PyTorch's four knapsack functions take part as solvers, called as PyTorch's partitioner calls them: sizes and room are shares
of the total.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, in_process
from remat.errors import SolverError
from remat.plugins import isolated, registry
from remat.solvers import KnapsackProblem, Solver, Status, run
from remat.solvers.bounds import relax
from remat.testing.families import FAMILIES, family

INSTANCES = Path(__file__).parent / "instances"
LIMIT_S = 1.0
GRACE_S = 1.0
OURS = ("native", "auto", "dp", "greedy")
PEERS = ("cpsat", "milp", "pulp")


class TorchKnapsack(Solver):
    """A function of ``torch._functorch._activation_checkpointing.knapsack``."""

    function: ClassVar[str] = ""
    time_limit: ClassVar[bool] = False

    def solve(self, problem: KnapsackProblem, **kwargs: Any) -> list[int]:
        from torch._functorch._activation_checkpointing import knapsack

        total = problem.total_weight or 1
        memory = [weight / total for weight in problem.weights]
        runtimes = [float(value) for value in problem.values]
        room = min(1.0, problem.capacity / total)
        saved: list[int] = getattr(knapsack, self.function)(memory, runtimes, room)[1]
        return saved

    def refuses(self, problem: KnapsackProblem) -> str | None:
        # Imported here, so that in a process of its own the clock does not count it.
        from torch._functorch._activation_checkpointing import knapsack

        return None if hasattr(knapsack, self.function) else f"torch has no {self.function}"


class TorchGreedy(TorchKnapsack):
    name: ClassVar[str] = "torch-greedy"
    function: ClassVar[str] = "greedy_knapsack"


class TorchIlp(TorchKnapsack):
    name: ClassVar[str] = "torch-ilp"
    function: ClassVar[str] = "ilp_knapsack"


class TorchDp(TorchKnapsack):
    name: ClassVar[str] = "torch-dp"
    function: ClassVar[str] = "dp_knapsack"


class TorchHirschberg(TorchKnapsack):
    name: ClassVar[str] = "torch-hirschberg"
    function: ClassVar[str] = "dp_knapsack_sliding_hirschberg"


FROM_TORCH: tuple[type[TorchKnapsack], ...] = (TorchGreedy, TorchIlp, TorchDp, TorchHirschberg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One problem of the grid; ``peers``: whether the slow ones face it too."""

    family: str
    items: int
    span: int
    share: int
    seed: int
    peers: bool

    def problem(self) -> KnapsackProblem:
        return family(
            self.family, items=self.items, span=self.span, share=self.share, seed=self.seed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer of one solver to one cell; no value if none fits."""

    solver: str
    cell: Cell
    seconds: float
    value: int | None = None
    bound: int | None = None
    proven: bool = False
    infeasible: bool = False
    reason: str | None = None


def cells(quick: bool) -> Iterator[Cell]:
    sizes = (50, 300) if quick else (50, 300, 1_000, 10_000)
    spans = (10**3, 10**7) if quick else (10**3, 10**5, 10**7)
    draws = ((50, 1),) if quick else tuple((h, s) for h in (10, 50, 90) for s in (1, 2, 3))
    for name in list(FAMILIES)[:2] if quick else FAMILIES:
        for items in sizes:
            for span in spans:
                for share, seed in draws:
                    peers = seed == 1 and share == 50 and items <= 1_000 and span != 10**5
                    yield Cell(
                        family=name, items=items, span=span, share=share, seed=seed, peers=peers
                    )


def contestants() -> tuple[list[Solver], list[Solver]]:
    """remat's, in this process; peers, each in its own. A solver that is not installed is missing."""
    ours, peers = [], []
    for name in (*OURS, *PEERS):
        try:
            solver = registry().solver(name)
        except SolverError as error:
            print(f"note: {error}", file=sys.stderr)
            continue
        if name in OURS:
            ours.append(solver)
        else:
            peers.append(isolated(solver, grace_s=GRACE_S))
    peers += [isolated(kind(), grace_s=GRACE_S) for kind in FROM_TORCH]
    for solver in (*ours, *peers):
        warm_up(solver)
    return ours, peers


def warm_up(solver: Solver) -> None:
    """Lets it load its libraries before the clock runs."""
    with contextlib.suppress(SolverError):
        run(solver, family("weakly-correlated", items=40, span=1_000, share=50, seed=1))


def attempt(solver: Solver, cell: Cell, problem: KnapsackProblem) -> Outcome:
    start = time.perf_counter()
    try:
        solution = run(solver, problem, time_limit=LIMIT_S)
    except SolverError as error:
        seconds = time.perf_counter() - start
        warm_up(solver)  # it may have been killed
        return Outcome(
            solver=solver.name,
            cell=cell,
            seconds=seconds,
            infeasible="overweight" in str(error),
            reason=str(error),
        )
    return Outcome(
        solver=solver.name,
        cell=cell,
        seconds=time.perf_counter() - start,
        value=solution.value,
        bound=solution.bound,
        proven=solution.status is Status.OPTIMAL,
    )


def grid_rows(quick: bool) -> Iterator[Row]:
    ours, peers = contestants()
    outcomes: list[Outcome] = []
    for cell in cells(quick):
        problem = cell.problem()
        facing = (*ours, *(peers if cell.peers else ()))
        outcomes += [attempt(solver, cell, problem) for solver in facing]
    bounds: dict[Cell, int] = {}
    for o in outcomes:
        known = bounds[o.cell] if o.cell in bounds else relax(o.cell.problem()).bound
        bounds[o.cell] = known if o.bound is None else min(known, o.bound)
    for shared in (False, True):
        counted = [o for o in outcomes if o.cell.peers or not shared]
        for name in (*FAMILIES, "all"):
            for solver in dict.fromkeys(o.solver for o in outcomes):
                mine = [o for o in counted if o.solver == solver and name in (o.cell.family, "all")]
                if mine:
                    facts = {"side": solver, "shared": shared, "family": name}
                    yield {**facts, **figures(mine, bounds)}


def figures(mine: Sequence[Outcome], bounds: dict[Cell, int]) -> Row:
    """The figures of one solver over some cells."""
    valued = [(o.value, bounds[o.cell]) for o in mine if o.value is not None]
    in_time = [o for o in mine if o.seconds <= LIMIT_S * 1.05]
    return {
        "cells": len(mine),
        "proven": sum(o.proven for o in in_time) / len(mine),
        "feasible": sum(o.value is not None for o in in_time) / len(mine),
        "median_s": statistics.median(o.seconds for o in mine),
        "worst_s": max(o.seconds for o in mine),
        "worst_gap": max(((b - v) / max(1, b) for v, b in valued), default=None),
        "infeasible": sum(o.infeasible for o in mine),
    }


def real_rows(quick: bool) -> Iterator[Row]:
    """Captured knapsacks, each at the capacity of its file: median of five runs of remat's, one of each peer."""
    ours, peers = contestants()
    for path in sorted(INSTANCES.glob("knapsack_*.json"))[: 1 if quick else None]:
        made = remat.load_instance(path)
        problem = made.problem
        name = f"{made.name} at {problem.capacity / max(1, problem.total_weight):.0%}"
        for solver in (*ours, *peers):
            seconds, reason, solution = [], None, None
            for _ in range(5 if solver in ours else 1):
                start = time.perf_counter()
                try:
                    # PyTorch's dp is given its time: the comparison is by how much.
                    limit = None if solver.name.startswith("torch") else LIMIT_S
                    solution = run(solver, problem, time_limit=limit)
                except SolverError as error:
                    reason = str(error)
                seconds.append(time.perf_counter() - start)
            yield {
                "side": solver.name,
                "instance": name,
                "items": len(problem),
                "seconds": statistics.median(seconds),
                "value": None if solution is None else solution.value,
                "proven": solution is not None and solution.status is Status.OPTIMAL,
                "reason": reason,
            }


def peak_bytes() -> int:
    """Peak memory of this process so far."""
    try:  # ru_maxrss starts from what the parent had
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "grid": grid_rows,
    "real": real_rows,
    "memory": memory_rows,
}


def measure(name: str, asked: Sequence[Case], quick: bool) -> Iterator[Row]:
    for row in PARTS[name](quick):
        yield {"workload": name, "budget": None, **row}


EXPERIMENTS = {
    "solvers": Experiment(
        name="solvers",
        about="knapsack solvers side by side, PyTorch's among them",
        cases=grid(PARTS, sides=("all",)),
        quick=grid(PARTS, sides=("all",)),
        measure=measure,
        summarise=lambda rows: {"limit_s": LIMIT_S},
        tables=("knapsacks",),
    ),
}
