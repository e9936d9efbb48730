"""The program over classes of modules as a matrix, and what HiGHS makes of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remat.sac.solve.cuts import Cut
from remat.sac.solve.module_classes import ModuleClass
from remat.solvers.quiet import quiet_stdout

#: Choices that HiGHS is shown at first, those of least reduced cost.
_FIRST = 400
#: HiGHS's word for a program without an answer.
_INFEASIBLE = 2

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """The linear relaxation.

    Attributes:
        value: its least costs.
        duals: of each row.
        reduced: by how much the costs rise at least for each time that a choice is taken.
    """

    value: float
    duals: Floats
    reduced: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """How often each choice is taken: least ``costs @ x`` for which ``matrix @ x <= limits``.

    Attributes:
        costs: of each choice, all classes one after the other, in ``unit`` picoseconds.
        matrix: a row for each cut, in ``size`` bytes, then one for the members of each class.
        limits: of each row.
        most: how often each choice can be taken at most.
        starts: position of the first choice of each class.
        cuts: how many rows are cuts.
        unit: picoseconds that costs are counted in.
        size: bytes that cuts are counted in.
    """

    costs: Floats
    matrix: Any
    limits: Floats
    most: Floats
    starts: Ints
    cuts: int
    unit: float
    size: float

    @classmethod
    def of(cls, found: Sequence[ModuleClass], cuts: Sequence[Cut], times: Sequence[Ints]) -> Linear:
        """Builds it.

        Args:
            found: the classes.
            cuts: what the memory demands.
            times: picoseconds of each choice, by class.
        """
        from scipy.sparse import csr_array

        starts = np.cumsum([0, *(len(t) for t in times)])
        size = max(1.0, max((abs(c.need) for c in cuts), default=1) / 2**20)
        unit = max(1.0, max((float(t.max(initial=1)) for t in times), default=1.0) / 2**20)
        rows, columns, values, limits = [], [], [], []
        for i, cut in enumerate(cuts):
            for (c, j), gain in cut.gains.items():
                rows.append(i)
                columns.append(int(starts[c]) + j)
                values.append(-gain / size)
            limits.append(-cut.need / size)
        parts = [(np.array(rows), np.array(columns), np.array(values))]
        for c, one in enumerate(found):
            a = c
            while a >= 0:
                own = np.arange(starts[a], starts[a + 1])
                share = len(one.members) / len(found[a].members)
                parts.append((np.full(len(own), len(limits)), own, np.full(len(own), share)))
                a = found[a].parent
            limits.append(len(one.members))
        row, column, value = (np.concatenate(p) for p in zip(*parts, strict=True))
        return cls(
            costs=np.concatenate(times) / unit,
            matrix=csr_array((value, (row, column)), shape=(len(limits), int(starts[-1]))),
            limits=np.array(limits, dtype=np.float64),
            most=np.repeat([float(len(c.members)) for c in found], np.diff(starts)),
            starts=starts,
            cuts=len(cuts),
            unit=unit,
            size=size,
        )

    @functools.cached_property
    def relaxed(self) -> Relaxed | None:
        """The linear relaxation; None without an answer."""
        from scipy.optimize import linprog

        solved = linprog(self.costs, A_ub=self.matrix, b_ub=self.limits, method="highs")
        if solved.status != 0:
            return None
        duals = np.maximum(0.0, -solved.ineqlin.marginals)
        reduced = np.maximum(0.0, self.costs + self.matrix.T @ duals)
        return Relaxed(value=float(solved.fun), duals=duals, reduced=reduced)

    def prices(self) -> Floats | None:
        """Picoseconds for a byte of each cut, by the linear relaxation; None without an answer."""
        if self.relaxed is None:
            return None
        return self.relaxed.duals[: self.cuts] * self.unit / self.size

    def solve(
        self, gap: float, nodes: int, time_limit: float | None, at_most: float = np.inf
    ) -> tuple[Counts, float] | None:
        """Counts by class and choice, and picoseconds that nothing gets below.

        Choices whose reduced cost is more than what an answer is above the relaxation are in no
        better answer, so that HiGHS is shown few of them.

        Args:
            gap: relative gap at which HiGHS may stop.
            nodes: branch-and-bound nodes, at most, where there is no time limit; down to a tenth of
                them where there are many choices.
            time_limit: seconds.
            at_most: picoseconds of an answer that is known.

        Returns:
            None if nothing meets the cuts.

        Raises:
            TimeoutError: it was stopped before it had an answer.
        """
        if self.relaxed is None:
            return None
        options: dict[str, float] = {"mip_rel_gap": gap}
        if time_limit is not None:
            options |= {"time_limit": time_limit}
        least, reduced = self.relaxed.value, self.relaxed.reduced
        shown, reach = _FIRST, 0.0
        if at_most < np.inf:
            reach = (at_most / self.unit - least) * (1.0 + 1e-9)
            shown = min(len(reduced), int((reduced <= reach).sum()))
        while True:
            every = shown >= len(reduced)
            reach = np.inf if every else max(reach, float(np.partition(reduced, shown)[shown]))
            near = np.flatnonzero(reduced <= reach)
            if time_limit is None:  # a node takes the longer the more choices there are
                options["node_limit"] = max(
                    nodes // 10, min(nodes, 3 * nodes * _FIRST // len(near))
                )
            solved = self._highs(near, options)
            if solved.x is None:
                if every:
                    if solved.status == _INFEASIBLE:
                        return None
                    raise TimeoutError(solved.message)
                shown *= 4
                continue
            bound = min(float(solved.mip_dual_bound), least + reach)
            if solved.fun - least <= reach or bound >= (1.0 - gap) * solved.fun:
                counts = np.zeros(len(reduced), dtype=np.int64)
                counts[near] = np.rint(solved.x)
                return self._by_class(counts), bound * self.unit
            reach, shown = (solved.fun - least) * (1.0 + 1e-9), len(near)

    def _highs(self, near: Ints, options: dict[str, float]) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp

        with quiet_stdout(noise="HighsMipSolverData::"):
            return milp(
                self.costs[near],
                constraints=LinearConstraint(self.matrix[:, near], ub=self.limits),
                integrality=np.ones(len(near)),
                bounds=Bounds(0, self.most[near]),
                options=options,
            )

    def _by_class(self, counts: Ints) -> Counts:
        pairs = zip(self.starts[:-1], self.starts[1:], strict=True)
        return tuple(tuple(counts[a:b].tolist()) for a, b in pairs)
