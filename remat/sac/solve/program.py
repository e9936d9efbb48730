"""Integer program over a whole step: which modules to checkpoint, and which results each stores.

A choice is a set of operators whose results a checkpointed module stores. The program has a 0/1
variable for each choice of each module. A program point is a moment of the step, such as the return
of an operator, or the rerun of one module call. Memory at each program point is linear in the
variables. Most solutions exceed the budget at few program points. So the program limits memory only
at program points at which an earlier solution exceeded the budget. Each such limit is a row of the
program.
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
    rerun_peaks,
    simulate,
    stored_bytes,
)
from remat.solvers.highs import milp
from remat.units import format_bytes

#: Largest number of branch-and-bound nodes for a program without a time limit. Unlike a time limit, this
#: limit gives the same plan on every machine.
NODES = 200
#: Largest number of times that one program is solved. After each solution, rows are added for the program points
#: at which the solution exceeds the budget.
ROUNDS = 60
#: Largest coefficient to which rows and the objective are scaled. The program is scaled because HiGHS's
#: tolerances are absolute.
_SCALE = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Decision about all modules, with the step's simulated memory and a bound on recompute time.

    A decision says which modules are checkpointed, and which results each of them stores.

    Attributes:
        decision: dict from the position of each checkpointed module to the module's choice.
        simulated: simulated memory of the step under the decision.
        bound_ps: lower bound in picoseconds on the recompute time of all decisions that fit the
            budget and take their choices from the same options; 0 if none is proven.
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
    deadline: float | None,
) -> Outcome:
    """Find the decision with the least recompute time among those whose peak fits a budget.

    Args:
        tree: the modules.
        options: dict from the position of each module that may be checkpointed to its choices.
        plain: bytes alive at each moment without checkpointing.
        budget: budget for the step's peak in bytes.
        gap: relative gap at which the solver HiGHS may stop.
        deadline: time of `time.monotonic` in seconds at which to stop; None: branch-and-bound nodes
            are limited instead.

    Raises:
        BudgetError: no decision fits the budget; the message states the least peak.
    """
    program = _Program(tree, options, plain)
    program.add_rows(simulate(tree, {}, plain), budget)
    bound, limit = 0.0, budget
    for _ in range(ROUNDS):
        answer = program.solve(limit, gap, _seconds_left(deadline))
        if answer is None:
            break
        # A bound for a lowered `limit` is no bound for the given budget.
        bound = max(bound, answer.bound) if limit == budget else bound
        if answer.decision is None:
            break
        simulated = simulate(tree, answer.decision, plain)
        if simulated.peak_bytes <= budget:
            return Outcome(decision=answer.decision, simulated=simulated, bound_ps=bound)
        # If there is no new row, HiGHS's tolerance let a row be exceeded. The limit is lowered by the excess.
        if not program.add_rows(simulated, budget):
            limit -= max(1, simulated.peak_bytes - budget)
    found = _least_peak(tree, options, plain, deadline)
    # The decision may fit although the search above found none: HiGHS stopped at its limit of time or nodes.
    if found.simulated.peak_bytes <= budget:
        return Outcome(decision=found.decision, simulated=found.simulated, bound_ps=bound)
    least = found.simulated.peak_bytes
    raise BudgetError(
        f"no plan fits into {format_bytes(budget)} ({budget} bytes): the least that checkpointing "
        f"gets the step to is {least} bytes ({format_bytes(least)}), so the budget is short by "
        f"{least - budget} bytes. Raise it, make the batch smaller, or spread parameters over "
        "more ranks"
    )


def _seconds_left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline; None without a deadline.

    The result is at least 0.1, so that HiGHS can still find a plan after the deadline.
    """
    return None if deadline is None else max(0.1, deadline - time.monotonic())


def _least_peak(
    tree: ModuleTree,
    options: Mapping[int, Sequence[ModuleChoice]],
    plain: Ints,
    deadline: float | None,
) -> Outcome:
    """Return the decision with the lowest peak among at most `ROUNDS` solutions of a program.

    Between two solutions, `_Program.add_rows` adds rows to the program. To lower the peak, only the
    choice with the fewest stored bytes is considered for each module.

    Args:
        tree: the modules.
        options: dict from the position of each module that may be checkpointed to its choices.
        plain: bytes alive at each moment without checkpointing.
        deadline: time of `time.monotonic` in seconds at which to stop; None: branch-and-bound nodes
            are limited instead.
    """
    # The last choice of a module stores the fewest bytes; see `choices`.
    program = _Program(tree, {k: c[-1:] for k, c in options.items()}, plain)
    best = Outcome(decision={}, simulated=simulate(tree, {}, plain), bound_ps=0.0)
    program.add_rows(best.simulated, best.simulated.peak_bytes - 1)
    for _ in range(ROUNDS):
        answer = program.solve(None, 0.0, _seconds_left(deadline))
        if answer is None or answer.decision is None:
            break
        simulated = simulate(tree, answer.decision, plain)
        if simulated.peak_bytes < best.simulated.peak_bytes:
            best = Outcome(decision=answer.decision, simulated=simulated, bound_ps=0.0)
        if not program.add_rows(simulated, max(int(answer.bound), 0)):
            break
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Result of one run of HiGHS.

    Attributes:
        decision: dict from the position of each checkpointed module to the module's choice; None if
            HiGHS reached its limit of time or nodes without a solution.
        bound: lower bound on the minimised quantity: picoseconds of recomputation, or bytes of the
            peak; see `_Program.solve`.
    """

    decision: Decision | None
    bound: float


class _Program:
    """Integer program of one step, to which `add_rows` adds constraints between two solutions.

    The columns are 0/1 variables for the choices of all modules, one module after another. The last
    column is a variable for the peak. Each row limits the memory at one program point: a moment of
    the step, or the rerun of a module call.
    """

    def __init__(
        self, tree: ModuleTree, options: Mapping[int, Sequence[ModuleChoice]], plain: Ints
    ) -> None:
        self._tree, self._options, self._plain = tree, options, plain
        ends = np.cumsum([len(c) for c in options.values()], dtype=int).tolist()
        self._count = ends[-1] if ends else 0
        self._columns = {
            k: slice(end - len(options[k]), end) for k, end in zip(options, ends, strict=True)
        }
        self._stored = {k: stored_bytes(tree.modules[k].operators, c) for k, c in options.items()}
        self._kept = {k: np.array([o.kept_bytes for o in c]) for k, c in options.items()}
        #: Dict from each program point with a row to the bytes that each choice adds at the point.
        #: A point is a moment, or (module, call) of a rerun.
        self._rows: dict[int | tuple[int, int], Ints] = {}

    def add_rows(self, simulated: Simulated, budget: int) -> bool:
        """Add a row for each program point whose memory exceeds a budget and that has no row yet.

        Of consecutive moments above the budget, only the moment with the most memory gets a row.
        This row usually limits memory at the other moments as well. If not, a later call adds rows
        for these moments.

        Args:
            simulated: simulated memory of a step under the latest solution.
            budget: budget in bytes.

        Returns:
            Whether a row was added.
        """
        over = np.flatnonzero(simulated.memory > budget)
        runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else []
        worst = (int(run[np.argmax(simulated.memory[run])]) for run in runs)
        rows: dict[int | tuple[int, int], Ints] = {
            t: self._at(t) for t in worst if t not in self._rows
        }
        for at, peak in simulated.reruns.items():
            if peak > budget and at not in self._rows:
                rows[at] = self._rerun(*at)
        self._rows |= rows
        return bool(rows)

    def _at(self, moment: int) -> Ints:
        """Return the bytes that each choice of each module adds at a moment; negative if the choice frees bytes."""
        row = np.zeros(self._count, dtype=np.int64)
        for k, columns in self._columns.items():
            module = self._tree.modules[k]
            for call in module.calls:
                if call.begin <= moment <= call.back_end:
                    row[columns] += self._tree.state_bytes
                if call.end <= moment <= call.back:
                    row[columns] += self._kept[k] - call.freeable_bytes
                elif call.begin <= moment < call.end:
                    at = np.array([moment])
                    row[columns] += held_longer(call, self._stored[k], at)[:, 0]
        return row

    def _rerun(self, k: int, i: int) -> Ints:
        """Return the bytes that each choice of each module adds to the peak while a module call runs again.

        Args:
            k: position of the module that runs again.
            i: position, among the module's calls, of the call that is recomputed.
        """
        module = self._tree.modules[k]
        call = module.calls[i]
        row = self._at(call.back)
        peaks = rerun_peaks(call, self._stored[k])
        row[self._columns[k]] += peaks - self._kept[k] + self._tree.state_bytes
        return row

    def solve(self, budget: int | None, gap: float, time_limit: float | None) -> _Answer | None:
        """Solve the program for the least recompute time within a budget, or for the least peak.

        Args:
            budget: budget in bytes; None: minimise the peak instead of the time.
            gap: relative gap at which HiGHS may stop.
            time_limit: time limit in seconds; None: branch-and-bound nodes are limited instead.

        Returns:
            The answer; None if the program is infeasible.
        """
        from scipy.sparse import csr_array, vstack

        unit_bytes = max(1.0, float(self._plain.max(initial=0)) / _SCALE)
        costs = np.zeros(self._count + 1)
        upper = np.ones(self._count + 1)
        if budget is None:
            unit, costs[-1], upper[-1] = unit_bytes, 1.0, np.inf
        else:
            for k, columns in self._columns.items():
                calls = len(self._tree.modules[k].calls)
                costs[columns] = [calls * c.recompute_ps for c in self._options[k]]
            unit = max(1.0, costs.max() / _SCALE)
            costs /= unit
            upper[-1] = budget / unit_bytes  # the budget limits the peak column
        memory, high = self._memory(unit_bytes)
        nesting = self._nesting()
        solved = milp(
            costs,
            vstack([csr_array(memory), nesting]),
            high=np.append(high, np.ones(nesting.shape[0])),
            integral=np.append(np.ones(self._count), 0),
            upper=upper,
            gap=gap,
            nodes=NODES,
            time_limit=time_limit,
        )
        if solved.infeasible:
            return None
        bound = max(0.0, solved.bound) * unit
        if solved.x is None:
            return _Answer(decision=None, bound=bound)
        decision = {
            k: choice
            for k, columns in self._columns.items()
            for choice, taken in zip(self._options[k], solved.x[columns], strict=True)
            if taken > 0.5  # HiGHS's integers are exact only up to a tolerance
        }
        return _Answer(decision=decision, bound=bound)

    def _memory(self, unit_bytes: float) -> tuple[Any, Any]:
        """Return the rows that limit memory at program points to the peak variable, and their upper limits.

        There is one row for each program point that `add_rows` has added.

        Args:
            unit_bytes: number of bytes in the unit in which the program counts memory.
        """
        rows = [np.append(row / unit_bytes, -1.0) for row in self._rows.values()]
        moments = [
            at if isinstance(at, int) else self._tree.modules[at[0]].calls[at[1]].back
            for at in self._rows
        ]
        return np.stack(rows), -self._plain[moments] / unit_bytes

    def _nesting(self) -> Any:
        """Return the rows that each module takes at most one choice, and that planned modules are not nested.

        For each module, one row, whose limit is 1, states: of all choices of the module and its
        ancestors, at most one is taken.
        """
        from scipy.sparse import lil_array

        matrix = lil_array((len(self._columns), self._count + 1))
        for i, k in enumerate(self._columns):
            for around in (k, *self._tree.ancestors(k)):
                if around in self._columns:
                    matrix[i, self._columns[around]] = 1.0
        return matrix.tocsr()
