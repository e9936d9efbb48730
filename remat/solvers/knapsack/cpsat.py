"""Solve knapsack and schedule problems with OR-Tools' CP-SAT."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from remat.errors import RefusalError
from remat.solvers.effort import EFFORT
from remat.solvers.interrupts import interruptible
from remat.solvers.knapsack.reduction import CoreSolver, reduce
from remat.solvers.problem import KnapsackProblem
from remat.solvers.schedule.core import schedule_core
from remat.solvers.schedule.cpsat import schedule_model
from remat.solvers.schedule.eviction import evicting
from remat.solvers.schedule.problem import ScheduleProblem, evaluate_schedule, not_found
from remat.solvers.solution import Answer, ScheduleAnswer

_SUM_LIMIT = 2**62 - 1  # CP-SAT rejects models whose sums may exceed this
_DOUBLE_LIMIT = 2**53  # CP-SAT reports bounds as doubles, which are exact up to here


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CpSat(CoreSolver):
    """Solver that runs OR-Tools' CP-SAT, which computes in integers, learns clauses and proves bounds.

    The solver uses one worker and a fixed seed, because several workers may give another answer in each run.

    Attributes:
        work: the most work to spend if there is no time limit, in CP-SAT's deterministic seconds.
            Deterministic seconds count operations and do not depend on the machine's speed.
    """

    work: float = 10.0

    name: ClassVar[str] = "cpsat"
    exact: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("ortools",)

    def refuses(self, problem: KnapsackProblem) -> str | None:
        """Return why CP-SAT cannot add up the weights or values of the reduced knapsack; None if CP-SAT can."""
        core = reduce(problem).core
        for label, total in (("weights", core.total_weight), ("values", core.total_value)):
            if total > _SUM_LIMIT:
                return f"{label} sum to {total}, above the 2**62 - 1 that CP-SAT can add up"
        return None

    def search(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Run CP-SAT, with the greedy choice as a hint, to a proven optimum or to its limit on time or `work`."""
        from ortools.sat.python import cp_model

        started = time.monotonic()
        relaxed = core.relaxed()
        model = cp_model.CpModel()
        picks = [model.new_bool_var("") for _ in range(len(core))]
        model.add(cp_model.LinearExpr.weighted_sum(picks, core.weights) <= core.capacity)
        model.maximize(cp_model.LinearExpr.weighted_sum(picks, core.values))
        greedy = set(relaxed.saved)
        for i, pick in enumerate(picks):
            model.add_hint(pick, i in greedy)

        solver = self._engine(started, time_limit)
        status = interruptible(lambda: solver.solve(model), solver.stop_search)

        saved, bound = relaxed.saved, relaxed.bound
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            picked = [i for i, pick in enumerate(picks) if solver.boolean_value(pick)]
            if status == cp_model.FEASIBLE:
                # A search that was cut short may leave capacity for further items.
                picked = list(core.repaired(picked))
            if core.value_of(picked) >= relaxed.value:
                saved = tuple(picked)
            if status == cp_model.OPTIMAL:
                bound = core.value_of(saved)
            elif core.total_value < _DOUBLE_LIMIT:
                bound = min(bound, math.floor(solver.best_objective_bound + 0.5))
        proven = core.value_of(saved) == bound
        return Answer(saved, bound, by_clock=not proven and time_limit is not None)

    def solve_schedule(
        self, problem: ScheduleProblem, *, time_limit: float | None = None
    ) -> ScheduleAnswer:
        """Search for the cheapest schedule in which no node runs more than twice, starting from `Greedy`'s schedule.

        The answer has no bound, because a schedule with more runs of a node might be cheaper.
        """
        from ortools.sat.python import cp_model

        started = time.monotonic()
        if len(problem) > EFFORT.schedule_nodes:
            raise RefusalError(
                self.name,
                f"solver 'cpsat' takes schedule problems of at most {EFFORT.schedule_nodes} nodes, got {len(problem)}",
            )
        if max(sum(problem.cost), sum(problem.size), problem.capacity or 0) > _SUM_LIMIT // 8:
            raise RefusalError(
                self.name, f"solver 'cpsat' holds sums up to {_SUM_LIMIT // 8}: use a coarser unit"
            )
        order = problem.order
        if problem.capacity is None:
            return ScheduleAnswer(order)
        start = evicting(problem)
        hint = order if start is None else start
        core = schedule_core(problem)
        model, rows = schedule_model(core, core.apply(problem, hint))
        solver = self._engine(started, time_limit)
        status = interruptible(lambda: solver.solve(model), solver.stop_search)
        by_clock = time_limit is not None and status != cp_model.OPTIMAL
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            # Runs have distinct positions, with gaps between them: a model has more positions than runs.
            runs = sorted((solver.value(t), v) for v, p, t in rows if solver.boolean_value(p))
            schedule = core.invert([v for _, v in runs])[0]
            # A search that was cut short may end with a schedule that is worse than its hint.
            if start is None or _cost(problem, schedule) <= _cost(problem, start):
                return ScheduleAnswer(schedule, by_clock=by_clock)
        if start is None:
            raise not_found(problem, evaluate_schedule(problem, order).peak_bytes)
        return ScheduleAnswer(start, by_clock=by_clock)

    def _engine(self, started: float, time_limit: float | None) -> Any:
        """Return OR-Tools' ``CpSolver`` with a limit on its work, or on its time since ``started``."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # answers of several workers do not repeat
        solver.parameters.random_seed = 0
        # OR-Tools would replace Python's handler for the rest of the process: Ctrl-C would then kill it.
        solver.parameters.catch_sigint_signal = False
        if time_limit is None:
            solver.parameters.max_deterministic_time = self.work
        else:
            left = time_limit - (time.monotonic() - started)
            solver.parameters.max_time_in_seconds = max(0.001, left)
        return solver


def _cost(problem: ScheduleProblem, sequence: Iterable[int]) -> int:
    return sum(problem.cost[v] for v in sequence)
