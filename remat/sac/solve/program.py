"""How often each choice of each class of modules is taken: a program, whose size is that of the classes.

Where few decisions are near its bound, `remat.sac.solve.label_merging` finds the best by merging, in milliseconds;
the rest is for HiGHS, in this process through SciPy, or for another solver through PuLP. All of them are
exact for the cuts that are given.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat.errors import SolverError
from remat.sac.solve.cuts import Cut
from remat.sac.solve.label_merging import TooManyLabelsError, cheapest
from remat.sac.solve.linear import Ints, Linear
from remat.sac.solve.module_classes import ModuleClass
from remat.solvers.pulp_cbc import load_pulp, pulp_engine

#: PuLP's names of solvers that have another one here.
BACKENDS = {"cbc": "COIN_CMD", "highs": "HiGHS_CMD", "scip": "SCIP_CMD", "gurobi": "GUROBI_CMD"}
#: Branch-and-bound nodes for one program, where no time limit is given: of HiGHS, and of others.
HIGHS_NODES, NODES = 10_000, 1_000
#: The same where a gap is left: such an answer only shows what is missing.
FEW_NODES = 200
#: Programs count microseconds, doubles being what they are.
_UNIT = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How often each choice of each class is taken, and picoseconds that nothing gets below.

    Attributes:
        counts: by class and choice.
        bound: picoseconds.
        exact: whether nothing better meets the cuts.
    """

    counts: tuple[tuple[int, ...], ...]
    bound: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Who solves programs, and how long that may take.

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
        """Solves a model of PuLP's, by CBC if need be; returns PuLP's status."""
        left = self.time_limit
        limits = {"maxNodes": nodes} if left is None else {"timeLimit": left}
        with tempfile.TemporaryDirectory() as folder:
            engine = pulp_engine(self.name or BACKENDS["cbc"], gapRel=gap, threads=1, **limits)
            engine.tmpDir = folder
            return int(model.solve(engine))


def solve(
    found: Sequence[ModuleClass],
    cuts: Sequence[Cut],
    backend: Backend,
    gap: float,
    *,
    at_least: float = 0.0,
    merging: bool = True,
) -> Answer | None:
    """Finds the counts of least time; None if none meet the cuts.

    Args:
        found: the classes.
        cuts: what the memory demands.
        backend: who is asked where merging is not enough.
        gap: relative gap that may be left.
        at_least: picoseconds that fewer cuts took at least.
        merging: whether to try that first.

    Raises:
        SolverError: the backend ended without an answer.
    """
    times = [_times(c, [x.recompute_ps for x in c.choices]) for c in found]
    linear = Linear.of(found, cuts, times) if found else None
    prices = linear.prices() if linear is not None and merging else None
    at_most = np.inf
    if prices is not None:
        try:
            counts, best, bound = cheapest(found, cuts, times, prices, at_least, gap)
            return Answer(counts=counts, bound=bound, exact=bound == best)
        except TooManyLabelsError as many:
            at_most = np.inf if many.good is None else float(many.good[1])
    if linear is None or backend.name is not None:
        return _through_pulp(found, cuts, times, backend, gap)
    try:
        answer = linear.solve(gap, HIGHS_NODES, backend.time_limit, at_most)
    except TimeoutError:
        raise SolverError("highs", "no answer within its limit; give more time, or a gap") from None
    if answer is None:
        return None
    counts, bound = answer
    spent = sum(int(t @ np.array(n)) for t, n in zip(times, counts, strict=True))
    # One picosecond of each choice taken is for sums of floats.
    exact = spent - bound <= max(1.0, 1e-7 * spent)
    return Answer(counts=counts, bound=min(bound, float(spent)), exact=exact)


def floor(found: Sequence[ModuleClass], cuts: Sequence[Cut], bound: float) -> float:
    """Picoseconds that nothing gets below, those choices included that were left out for being many.

    What takes a choice whose floor has a reduced cost beyond the bound is not below the bound. All else
    is below it by no more than the choices that it takes are above their floors.

    Args:
        found: the classes.
        cuts: what the memory demands.
        bound: picoseconds that the choices which are there take at least.
    """
    times = [_times(c, [x.recompute_ps for x in c.choices]) for c in found]
    floors = [_times(c, c.floors) for c in found]
    slack = [t - f for t, f in zip(times, floors, strict=True)]
    if not any(s.any() for s in slack):
        return bound
    linear = Linear.of(found, cuts, floors)
    if linear.relaxed is not None:
        reach = bound / linear.unit - linear.relaxed.value
        for c, reduced in enumerate(np.split(linear.relaxed.reduced, linear.starts[1:-1])):
            slack[c][reduced > reach * (1.0 + 1e-9)] = 0
    most = [0] * len(found)  # for a member, and all that is below it instead
    total = 0
    for c in reversed(range(len(found))):
        most[c] = max(most[c], int(slack[c].max(initial=0)))
        if found[c].parent >= 0:
            most[found[c].parent] += found[c].each * most[c]
        else:
            total += len(found[c].members) * most[c]
    return bound - total


def _times(one: ModuleClass, ps: Sequence[int]) -> Ints:
    """Picoseconds of each choice of a class, for all calls of a member."""
    return np.array(ps, dtype=np.int64) * len(one.gains[0])


def _through_pulp(
    found: Sequence[ModuleClass],
    cuts: Sequence[Cut],
    times: Sequence[Any],
    backend: Backend,
    gap: float,
) -> Answer | None:
    pulp = load_pulp()
    model = pulp.LpProblem("modules", pulp.LpMinimize)
    new = getattr(model, "add_variable", pulp.LpVariable)  # since and before PuLP 3.3
    counts = [
        [new(f"n{c}_{j}", 0, len(one.members), pulp.LpInteger) for j in range(len(one.choices))]
        for c, one in enumerate(found)
    ]
    scale = max(1.0, max((abs(c.need) for c in cuts), default=1) / 2**20)
    model += pulp.LpAffineExpression(
        [
            (n, float(ps) / _UNIT)
            for taken, each in zip(counts, times, strict=True)
            for n, ps in zip(taken, each, strict=True)
        ]
    )
    for cut in cuts:
        row = [(counts[c][j], gain / scale) for (c, j), gain in cut.gains.items()]
        model += pulp.LpAffineExpression(row) >= cut.need / scale
    for c, one in enumerate(found):
        nested = []
        a = c
        while a >= 0:
            nested += [(n, len(one.members) / len(found[a].members)) for n in counts[a]]
            a = found[a].parent
        model += pulp.LpAffineExpression(nested) <= len(one.members)
    status = backend.run(model, gap, NODES if gap == backend.gap else FEW_NODES)
    if status == pulp.LpStatusInfeasible:
        return None
    if status != pulp.LpStatusOptimal:
        raise SolverError("pulp", f"{backend.name} ended with '{pulp.LpStatus[status]}'")
    exact = model.sol_status == pulp.LpSolutionOptimal and not gap
    rounded = tuple(tuple(round(n.varValue or 0.0) for n in row) for row in counts)
    if not exact:  # PuLP hands no bound on: that of the relaxation is one
        for n in model.variables():
            n.cat = pulp.LpContinuous
        backend.run(model, 0.0, NODES)
    bound = float(pulp.value(model.objective)) * _UNIT
    return Answer(counts=rounded, bound=bound, exact=exact)
