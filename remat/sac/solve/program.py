"""Integer program that decides which modules of a step to checkpoint, and which results each of them stores.

The integer program has a 0/1 variable for each set of results that a module may store. Memory at each program point of
the step is linear in the variables. Most solutions exceed the budget at few program points. The integer program
therefore limits memory only at program points at which an earlier solution exceeded the budget.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remat.errors import BudgetError
from remat.sac.estimation.lifetimes import Ints
from remat.sac.estimation.modules import ModuleTree
from remat.sac.solve.choices import StoredSet
from remat.sac.solve.peaks import AddedBytes, Decision, Simulated, simulate
from remat.solvers.highs import milp
from remat.units import format_bytes

#: Largest number of branch-and-bound nodes for an integer program without a time limit. Unlike a time
#: limit, a limit on nodes gives the same plan on every machine.
NODES = 200
#: Largest number of times that one integer program is solved. After each solution, constraints are added for the
#: program points at which the solution exceeds the budget.
ROUNDS = 60
#: Largest coefficient to which constraints and the objective are scaled, because HiGHS's tolerances are
#: absolute.
_SCALE = 2.0**20
#: Program point: a program point of the step, or the rerun of one module call as (module, call).
Point = int | tuple[int, int]


def least_time(
    tree: ModuleTree,
    options: Mapping[int, Sequence[StoredSet]],
    plain: Ints,
    budget: int,
    *,
    gap: float,
    deadline: float | None,
) -> tuple[Decision, float]:
    """Find the checkpointing decision with the least recompute time among those whose peak fits a budget.

    Args:
        tree: the modules.
        options: dict from the position of each module that may be checkpointed to the sets of
            results that the module may store.
        plain: bytes alive at each program point without checkpointing.
        budget: budget for the step's peak in bytes.
        gap: relative gap between solution and bound at which the solver HiGHS may stop.
        deadline: time of `time.monotonic` at which to stop; None: a limit on branch-and-bound nodes.

    Returns:
        The decision, and a lower bound in picoseconds on the recompute time of every decision that fits the budget and
        selects from the same stored sets; 0 if no bound is proven.

    Raises:
        BudgetError: no decision fits the budget; the message states the least peak.
    """
    program = _Program(tree, options, plain)
    program.add_rows(simulate(tree, {}, plain), budget)
    bound, limit = 0.0, budget
    for _ in range(ROUNDS):
        decision, proven = program.solve(limit, gap, deadline)
        # A bound for a lowered `limit` is no bound for the given budget.
        bound = max(bound, proven) if limit == budget else bound
        if decision is None:
            break
        simulated = simulate(tree, decision, plain)
        if simulated.peak_bytes <= budget:
            return decision, bound
        # If no constraint is new, the solution exceeds an old one within HiGHS's tolerance. The limit is
        # lowered by the excess.
        if not program.add_rows(simulated, budget):
            limit -= max(1, simulated.peak_bytes - budget)
    decision, least = _least_peak(tree, options, plain, deadline)
    # The decision may fit although the loop above found none, because HiGHS may have stopped at a limit of
    # time or nodes.
    if least <= budget:
        return decision, bound
    raise BudgetError(
        f"no plan fits into {format_bytes(budget)} ({budget} bytes): the least that checkpointing "
        f"gets the step to is {least} bytes ({format_bytes(least)}), so the budget is short by "
        f"{least - budget} bytes. Raise it, make the batch smaller, or spread parameters over "
        "more ranks"
    )


def _least_peak(
    tree: ModuleTree,
    options: Mapping[int, Sequence[StoredSet]],
    plain: Ints,
    deadline: float | None,
) -> tuple[Decision, int]:
    """Return the decision with the lowest peak, and this peak; checkpointed modules store as few bytes as possible."""
    # The last set of a module has the fewest bytes; see `stored_sets`.
    program = _Program(tree, {k: c[-1:] for k, c in options.items()}, plain)
    best: Decision = {}
    simulated = simulate(tree, best, plain)
    least = simulated.peak_bytes
    program.add_rows(simulated, least - 1)
    for _ in range(ROUNDS):
        decision, bound = program.solve(None, 0.0, deadline)
        if decision is None:
            break
        simulated = simulate(tree, decision, plain)
        if simulated.peak_bytes < least:
            best, least = decision, simulated.peak_bytes
        if not program.add_rows(simulated, int(bound)):
            break
    return best, least


class _Program:
    """Integer program for one step, to which `add_rows` adds limits on memory after each solution."""

    def __init__(
        self, tree: ModuleTree, options: Mapping[int, Sequence[StoredSet]], plain: Ints
    ) -> None:
        self._tree, self._options, self._plain = tree, options, plain
        # The columns are the variables of all modules, one module after another, then one for the peak.
        ends = np.cumsum([len(c) for c in options.values()], dtype=int).tolist()
        self._count = ends[-1] if ends else 0
        self._columns = {
            k: slice(end - len(options[k]), end) for k, end in zip(options, ends, strict=True)
        }
        self._added = {
            k: AddedBytes(tree.modules[k], c, tree.state_bytes) for k, c in options.items()
        }
        #: Dict from each program point whose memory is limited to the bytes that each stored set adds at the point,
        #: and the bytes alive at the point without checkpointing.
        self._rows: dict[Point, tuple[Ints, int]] = {}

    def add_rows(self, simulated: Simulated, budget: int) -> bool:
        """Limit memory at program points where a simulation exceeds the budget; return whether a limit is new."""
        # Of consecutive program points above the budget, only the highest gets a row, which usually limits the others
        # as well.
        over = np.flatnonzero(simulated.memory > budget)
        runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else []
        worst = (int(run[np.argmax(simulated.memory[run])]) for run in runs)
        reruns = (point for point, peak in simulated.reruns.items() if peak > budget)
        points: list[Point] = [*worst, *reruns]
        rows = {point: self._row(point) for point in points if point not in self._rows}
        self._rows |= rows
        return bool(rows)

    def _row(self, point: Point) -> tuple[Ints, int]:
        """Return the bytes that each set of stored results adds at a program point, and those without checkpointing."""
        # A module call runs again where the call's backward starts.
        at = point if isinstance(point, int) else self._tree.modules[point[0]].calls[point[1]].back
        row = np.zeros(self._count, dtype=np.int64)
        for k, columns in self._columns.items():
            row[columns] = self._added[k].at(np.array([at]))[:, 0]
        if not isinstance(point, int):
            k, i = point
            row[self._columns[k]] += self._added[k].in_rerun(i)
        return row, int(self._plain[at])

    def solve(
        self, budget: int | None, gap: float, deadline: float | None
    ) -> tuple[Decision | None, float]:
        """Find the decision with the least recompute time within a budget; if ``budget`` is None, with the least peak.

        Returns:
            The decision, None if HiGHS found none, and the proven lower bound, 0 if there is none.
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
        memory = [np.append(row / unit_bytes, -1.0) for row, _ in self._rows.values()]
        high = [-plain / unit_bytes for _, plain in self._rows.values()]
        nesting = self._nesting()
        solved = milp(
            costs,
            vstack([csr_array(np.stack(memory)), nesting]),
            high=np.append(high, np.ones(nesting.shape[0])),
            integral=np.append(np.ones(self._count), 0),
            upper=upper,
            gap=gap,
            nodes=NODES,
            # HiGHS gets at least 0.1 s, so that it can still find a plan after the deadline.
            time_limit=None if deadline is None else max(0.1, deadline - time.monotonic()),
        )
        if solved.infeasible:
            return None, 0.0
        bound = max(0.0, solved.bound) * unit
        if solved.x is None:
            return None, bound
        decision = {
            k: stored_set
            for k, columns in self._columns.items()
            for stored_set, value in zip(self._options[k], solved.x[columns], strict=True)
            if value > 0.5  # HiGHS's integers are exact only up to a tolerance
        }
        return decision, bound

    def _nesting(self) -> Any:
        """Return constraints: of a module and its ancestors, at most one is checkpointed."""
        from scipy.sparse import lil_array

        matrix = lil_array((len(self._columns), self._count + 1))
        for i, k in enumerate(self._columns):
            for ancestor in (k, *self._tree.ancestors(k)):
                if ancestor in self._columns:
                    matrix[i, self._columns[ancestor]] = 1.0
        return matrix.tocsr()
