"""Which modules to checkpoint, and what each stores: one integer program over a whole step.

A 0/1 variable stands for each choice of each module, and a row for each program point: memory there is
linear in the choices. A module's bytes and whether it is checkpointed at all are variables of their own,
so that a row has two entries for a module and not one for each of its choices.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat.errors import BudgetError
from remat.sac.estimation.modules import ModuleTree
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.choices import ModuleChoice
from remat.sac.solve.peaks import (
    Decision,
    Simulated,
    held_longer,
    moments_of_interest,
    rerun_peaks,
    simulate,
    stored_sets,
)
from remat.solvers.highs import milp
from remat.units import format_bytes

#: Branch-and-bound nodes of one program, where no time limit is given.
NODES = 2_000
#: Programs for one plan, at most: each has rows that the answer before it broke.
ROUNDS = 20
#: Largest coefficient of a row or of the objective: HiGHS takes smaller differences for rounding errors.
_SCALE = 2.0**20
#: HiGHS's status of a program without an answer.
_INFEASIBLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A decision that fits, and a lower bound on the time of those that fit.

    Attributes:
        decision: module to its choice.
        simulated: the memory of the step under it.
        bound_ps: least picoseconds of recomputation with the same choices.
    """

    decision: Decision
    simulated: Simulated
    bound_ps: float


def least_time(
    tree: ModuleTree,
    options: Mapping[int, Sequence[ModuleChoice]],
    plain: Ints,
    budget: int,
    *,
    gap: float,
    time_limit: float | None = None,
) -> Outcome:
    """Find the decision of least recompute time within a budget.

    Args:
        tree: the modules.
        options: the choices of each module that may be checkpointed.
        plain: bytes alive by moment without checkpointing.
        budget: bytes.
        gap: relative gap at which HiGHS may stop.
        time_limit: seconds; None: nodes are counted.

    Raises:
        BudgetError: nothing fits; the message names the least peak.
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    program = _Program(tree, options, plain)
    bound, limit = 0.0, budget
    for _ in range(ROUNDS):
        answer = program.solve(limit, gap, _seconds_left(deadline))
        if answer is None:
            break
        # A budget that was lowered to make up for rounding proves nothing about the one given.
        bound = max(bound, answer.bound) if limit == budget else bound
        if answer.decision is None:
            break
        simulated = simulate(tree, answer.decision, plain)
        if simulated.peak_bytes <= budget:
            return Outcome(decision=answer.decision, simulated=simulated, bound_ps=bound)
        if not program.add_moments(simulated.memory, budget):
            limit -= max(1, simulated.peak_bytes - budget)
    found = _least_peak(tree, options, plain, _seconds_left(deadline))
    if found.simulated.peak_bytes <= budget:  # HiGHS ended at its limit
        return Outcome(decision=found.decision, simulated=found.simulated, bound_ps=bound)
    least = found.simulated.peak_bytes
    raise BudgetError(
        f"no plan fits into {format_bytes(budget)} ({budget} bytes): the least that checkpointing "
        f"gets the step to is {least} bytes ({format_bytes(least)}), so the budget is short by "
        f"{least - budget} bytes. Raise it, make the batch smaller, or spread parameters over "
        "more ranks"
    )


def _seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.1, deadline - time.monotonic())


def _least_peak(
    tree: ModuleTree,
    options: Mapping[int, Sequence[ModuleChoice]],
    plain: Ints,
    time_limit: float | None,
) -> Outcome:
    """The decision of the lowest peak, among those in which modules keep the least that they can."""
    program = _Program(tree, {k: c[-1:] for k, c in options.items()}, plain)
    best = Outcome(decision={}, simulated=simulate(tree, {}, plain), bound_ps=0.0)
    for _ in range(ROUNDS):
        answer = program.solve(None, 0.0, time_limit)
        if answer is None or answer.decision is None:
            break
        simulated = simulate(tree, answer.decision, plain)
        if simulated.peak_bytes < best.simulated.peak_bytes:
            best = Outcome(decision=answer.decision, simulated=simulated, bound_ps=0.0)
        # A row that is missing lets the program take a higher peak for a lower one.
        if not program.add_moments(simulated.memory, best.simulated.peak_bytes - 1):
            break
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What HiGHS found.

    Attributes:
        decision: module to its choice; None if HiGHS ended at its limit without one.
        bound: least picoseconds, or bytes of the peak.
    """

    decision: Decision | None
    bound: float


class _Program:
    """The program of one step, as a sparse matrix.

    Columns: each choice of each module; for each module whether it is checkpointed; for each module the
    bytes that it keeps; the peak.
    """

    def __init__(
        self, tree: ModuleTree, options: Mapping[int, Sequence[ModuleChoice]], plain: Ints
    ) -> None:
        self._tree, self._options, self._plain = tree, options, plain
        self._modules = sorted(options)
        ends = np.cumsum([len(options[k]) for k in self._modules], dtype=int).tolist()
        starts = [0, *ends][: len(ends)]
        self._choices = {
            k: range(a, b) for k, a, b in zip(self._modules, starts, ends, strict=True)
        }
        count, each = len(self._modules), ends[-1] if ends else 0
        self._chosen = {k: each + i for i, k in enumerate(self._modules)}
        self._kept = {k: each + count + i for i, k in enumerate(self._modules)}
        self._peak = each + 2 * count
        self._stored = {k: stored_sets(tree.modules[k].operators, c) for k, c in options.items()}
        self._unit_bytes = max(1.0, float(plain.max(initial=0)) / _SCALE)
        self._moments = set(moments_of_interest(tree, options, plain))
        self._points = [self._at(t) for t in sorted(self._moments)]
        self._points += [
            self._rerun(k, i) for k in self._modules for i in range(len(tree.modules[k].calls))
        ]

    def add_moments(self, memory: Ints, budget: int) -> bool:
        """Add rows for the moments over a budget that have none yet: the worst of each run of moments."""
        over = np.flatnonzero(memory > budget)
        runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else []
        worst = {int(run[np.argmax(memory[run])]) for run in runs} - self._moments
        self._moments |= worst
        self._points += [self._at(t) for t in sorted(worst)]
        return bool(worst)

    def _at(self, moment: int) -> tuple[dict[int, float], int]:
        """Bytes that each column adds at a moment, and the bytes without checkpointing."""
        row: dict[int, float] = {}
        for k in self._modules:
            module = self._tree.modules[k]
            for call in module.calls:
                if call.end <= moment <= call.back:
                    row[self._kept[k]] = row.get(self._kept[k], 0) + 1
                    row[self._chosen[k]] = row.get(self._chosen[k], 0) - call.freeable_bytes
                elif call.begin <= moment < call.end:
                    at = np.array([moment])
                    held = held_longer(call, module.operators, self._stored[k], at)[:, 0]
                    _add(row, self._choices[k], held)
        return row, int(self._plain[moment])

    def _rerun(self, k: int, i: int) -> tuple[dict[int, float], int]:
        """The same while a module runs again in one of its calls."""
        module = self._tree.modules[k]
        call = module.calls[i]
        row, plain = self._at(call.back)
        peaks = rerun_peaks(call, module.operators, self._stored[k])
        kept = np.array([c.kept_bytes for c in self._options[k]], dtype=np.int64)
        _add(row, self._choices[k], peaks - kept)
        return row, plain

    def solve(self, budget: int | None, gap: float, time_limit: float | None) -> _Answer | None:
        """Solve it for the least time within a budget, or for the least peak.

        Args:
            budget: bytes; None: the least peak is wanted.
            gap: relative gap at which HiGHS may stop.
            time_limit: seconds; None: nodes are counted.

        Returns:
            None if nothing fits.
        """
        from scipy.optimize import Bounds, LinearConstraint

        choices = [
            (c, o, len(self._tree.modules[k].calls))
            for k in self._modules
            for c, o in zip(self._choices[k], self._options[k], strict=True)
        ]
        costs = np.zeros(self._peak + 1)
        unit = self._unit_bytes
        if budget is None:
            costs[self._peak] = 1.0
        else:
            for column, choice, calls in choices:
                costs[column] = choice.recompute_ps * calls
            unit = max(1.0, costs.max(initial=0) / _SCALE)
            costs /= unit
        upper = np.ones(self._peak + 1)
        upper[self._peak] = np.inf if budget is None else budget / self._unit_bytes
        for k, column in self._kept.items():
            upper[column] = max(c.kept_bytes for c in self._options[k]) / self._unit_bytes
        integrality = np.zeros(self._peak + 1)
        integrality[: len(choices)] = 1
        limits = {"time_limit": time_limit} if time_limit is not None else {"node_limit": NODES}
        matrix, low, high = self._matrix()
        solved = milp(
            costs,
            constraints=LinearConstraint(matrix, low, high),
            integrality=integrality,
            bounds=Bounds(0, upper),
            options={"mip_rel_gap": gap, **limits},
        )
        if solved.status == _INFEASIBLE:
            return None
        bound = max(0.0, float(solved.mip_dual_bound or 0.0)) * unit
        if solved.x is None:
            return _Answer(decision=None, bound=bound)
        decision = {
            k: choice
            for k in self._modules
            for column, choice in zip(self._choices[k], self._options[k], strict=True)
            if solved.x[column] > 0.5
        }
        return _Answer(decision=decision, bound=bound)

    def _matrix(self) -> tuple[Any, list[float], list[float]]:
        """The rows of the program, with their lower and upper limits."""
        from scipy.sparse import csr_array

        rows: list[dict[int, float]] = []
        low, high = [], []

        def add(row: dict[int, float], least: float, most: float) -> None:
            rows.append(row)
            low.append(least)
            high.append(most)

        for point, plain in self._points:
            # Choices and whether a module is chosen are counted, kept bytes are in units already.
            row = {
                c: v if self._peak - len(self._modules) <= c else v / self._unit_bytes
                for c, v in point.items()
            }
            add(row | {self._peak: -1.0}, -np.inf, -plain / self._unit_bytes)
        for k in self._modules:
            own = self._choices[k]
            add(dict.fromkeys(own, 1.0) | {self._chosen[k]: -1.0}, 0.0, 0.0)
            kept = (c.kept_bytes / self._unit_bytes for c in self._options[k])
            add(dict(zip(own, kept, strict=True)) | {self._kept[k]: -1.0}, 0.0, 0.0)
            around = [a for a in self._tree.ancestors(k) if a in self._options]
            add({self._chosen[a]: 1.0 for a in (k, *around)}, -np.inf, 1.0)
        places = np.cumsum([0, *(len(row) for row in rows)])
        columns = [c for row in rows for c in row]
        values = [v for row in rows for v in row.values()]
        shape = (len(rows), self._peak + 1)
        return csr_array((values, columns, places), shape=shape), low, high


def _add(row: dict[int, float], columns: range, values: Ints) -> None:
    for column, value in zip(columns, values.tolist(), strict=True):
        if value:
            row[column] = row.get(column, 0) + value
