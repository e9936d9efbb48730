"""The integer program over classes of modules as a matrix, and its solvers.

HiGHS solves it in this process, through SciPy; another solver, where one is named, through PuLP.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remat.errors import SolverError
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.cuts import BudgetCut
from remat.sac.solve.module_classes import ModuleClass, columns
from remat.solvers.highs import milp
from remat.solvers.pulp_cbc import load_pulp, pulp_engine

#: PuLP's names of solvers that have another one here.
BACKENDS = {"cbc": "COIN_CMD", "highs": "HiGHS_CMD", "scip": "SCIP_CMD", "gurobi": "GUROBI_CMD"}
#: Branch-and-bound nodes for one program, where no time limit is given: of HiGHS, and of others.
HIGHS_NODES, NODES = 10_000, 1_000
#: The same where a gap is left: such an answer only shows what is missing.
FEW_NODES = 200

#: Choices that HiGHS is shown at first, those of least reduced cost.
_FIRST = 400
#: HiGHS's word for a program without an answer.
_INFEASIBLE = 2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The solver of programs, and its limits.

    Attributes:
        name: PuLP's name of a solver; None: HiGHS through SciPy.
        gap: relative gap at which it may stop.
        deadline: by the monotonic clock; None: work is counted.
    """

    name: str | None
    gap: float
    deadline: float | None

    @property
    def time_limit(self) -> float | None:
        """Seconds that are left."""
        return None if self.deadline is None else max(0.1, self.deadline - time.monotonic())

    def run(self, model: Any, gap: float, nodes: int) -> int:
        """Solves a model of PuLP's; returns PuLP's status."""
        left = self.time_limit
        limits = {"maxNodes": nodes} if left is None else {"timeLimit": left}
        with tempfile.TemporaryDirectory() as folder:
            engine = pulp_engine(self.name or "", gapRel=gap, threads=1, **limits)
            engine.tmpDir = folder
            return int(model.solve(engine))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """The linear relaxation.

    Attributes:
        value: its least costs.
        duals: of each row.
        reduced: reduced costs: a lower bound on what each use of a choice adds to the value.
    """

    value: float
    duals: Floats
    reduced: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """How often each choice is taken: least ``costs @ x`` for which ``matrix @ x <= limits``.

    Attributes:
        costs: of each choice (`remat.sac.solve.module_classes.columns`), in ``unit``; last of the peak,
            if that is what is minimised.
        matrix: a row for each cut, in ``size`` bytes, then one for the members of each class.
        limits: of each row.
        most: how often each choice can be taken at most; infinite for the peak, which is no count.
        cuts: how many rows are cuts.
        unit: picoseconds that costs are counted in; bytes for the peak.
        size: bytes that cuts are counted in.
    """

    costs: Floats
    matrix: Any
    limits: Floats
    most: Floats
    cuts: int
    unit: float
    size: float

    @classmethod
    def of(
        cls,
        found: Sequence[ModuleClass],
        cuts: Sequence[BudgetCut],
        times: Ints | None = None,
    ) -> Linear:
        """The program for some classes and cuts.

        Args:
            found: the classes.
            cuts: what the memory demands.
            times: picoseconds of each choice; None: the least peak is looked for, and the cuts are those
                of a budget of 0.
        """
        from scipy.sparse import csr_array

        at = columns(found)
        gains, needs = np.stack([c.gains for c in cuts]), np.array([c.need for c in cuts])
        size = max(1.0, float(abs(needs).max()) / 2**20)
        shares = np.zeros((len(found), gains.shape[1]))
        for c, one in enumerate(found):
            a = c
            while a >= 0:
                shares[c, at[a]] = len(one.members) / len(found[a].members)
                a = found[a].parent
        members = np.array([float(len(c.members)) for c in found])
        rows = np.vstack([-gains / size, shares])
        most = np.repeat(members, [len(c.choices) for c in found])
        if times is None:
            unit, costs, most = size, np.append(np.zeros(len(most)), 1.0), np.append(most, np.inf)
            rows = np.column_stack([rows, np.repeat([-1.0, 0.0], [len(cuts), len(found)])])
        else:
            unit = max(1.0, float(times.max(initial=1)) / 2**20)
            costs = times / unit
        return cls(
            costs=costs,
            matrix=csr_array(rows),
            limits=np.concatenate([-needs / size, members]),
            most=most,
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
        """Picoseconds per byte of each cut: the duals of the relaxation; None without a solution."""
        if self.relaxed is None:
            return None
        return self.relaxed.duals[: self.cuts] * self.unit / self.size

    def solve(
        self, backend: Backend, gap: float, at_most: float = np.inf
    ) -> tuple[Ints, float] | None:
        """How often each choice is taken, and a lower bound on the costs, in picoseconds or bytes.

        Args:
            backend: the solver and its limits.
            gap: relative gap at which it may stop.
            at_most: time of a known solution, in picoseconds.

        Returns:
            None if nothing meets the cuts.

        Raises:
            SolverError: it was stopped before it had an answer.
        """
        if backend.name is not None:
            return self._by_pulp(backend, gap)
        return self._by_highs(gap, HIGHS_NODES, backend.time_limit, at_most)

    def _by_highs(
        self, gap: float, nodes: int, time_limit: float | None, at_most: float
    ) -> tuple[Ints, float] | None:
        """Solves it over few choices first.

        No better solution has a choice whose reduced cost exceeds the distance of a known solution from
        the relaxation; HiGHS is not shown those. Nodes are counted where there is no time limit, down to a tenth where there are many choices.
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
                    raise SolverError(
                        "highs", "no answer within its limit; give more time, or a gap"
                    )
                shown *= 4
                continue
            bound = min(float(solved.mip_dual_bound), least + reach)
            if solved.fun - least <= reach or bound >= (1.0 - gap) * solved.fun:
                counts = np.zeros(len(reduced), dtype=np.int64)
                counts[near] = np.rint(solved.x)
                return self._choices(counts), bound * self.unit
            reach, shown = (solved.fun - least) * (1.0 + 1e-9), len(near)

    def _highs(self, near: Ints, options: dict[str, float]) -> Any:
        from scipy.optimize import Bounds, LinearConstraint

        return milp(
            self.costs[near],
            constraints=LinearConstraint(self.matrix[:, near], ub=self.limits),
            integrality=np.isfinite(self.most[near]),
            bounds=Bounds(0, self.most[near]),
            options=options,
        )

    def _choices(self, counts: Ints) -> Ints:
        """The counts without the peak."""
        return counts[np.isfinite(self.most)]

    def _by_pulp(self, backend: Backend, gap: float) -> tuple[Ints, float] | None:
        pulp = load_pulp()
        model = pulp.LpProblem("modules", pulp.LpMinimize)
        new = getattr(model, "add_variable", pulp.LpVariable)  # since and before PuLP 3.3
        taken = [
            new(f"n{i}", 0, most, pulp.LpInteger) if most < np.inf else new(f"n{i}", 0)
            for i, most in enumerate(self.most.tolist())
        ]
        model += pulp.LpAffineExpression(list(zip(taken, self.costs.tolist(), strict=True)))
        places, columns, values = (
            x.tolist() for x in (self.matrix.indptr, self.matrix.indices, self.matrix.data)
        )
        for i, limit in enumerate(self.limits.tolist()):
            part = range(places[i], places[i + 1])
            row = [(taken[columns[p]], values[p]) for p in part]
            model += pulp.LpAffineExpression(row) <= limit
        status = backend.run(model, gap, NODES if gap == backend.gap else FEW_NODES)
        if status == pulp.LpStatusInfeasible:
            return None
        if status != pulp.LpStatusOptimal:
            raise SolverError("pulp", f"{backend.name} ended with '{pulp.LpStatus[status]}'")
        counts = np.rint([n.varValue or 0.0 for n in taken]).astype(np.int64)
        if gap or model.sol_status != pulp.LpSolutionOptimal:
            # PuLP hands no bound on: that of the relaxation is one.
            for n in taken:
                n.cat = pulp.LpContinuous
            backend.run(model, 0.0, NODES)
        return self._choices(counts), float(pulp.value(model.objective)) * self.unit
