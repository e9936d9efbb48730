"""CBC, through PuLP and the binary that it brings.

CBC computes in floating point, like HiGHS, and gets the same treatment. PuLP hands numbers over as
text of thirteen digits, so sums stay below that, and passes on no bound but a claim of optimality.

PuLP imports ``highspy`` where it finds it. Its ``libhighs`` and the one of OR-Tools have the same
name, and whichever is loaded second fails; remat cannot do without OR-Tools, so PuLP is kept from it.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from remat.solvers.covers import Attempt, Cover, search
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import ReducingSolver
from remat.solvers.solution import Answer

_VALUE_LIMIT = 10**12


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PulpCbc(ReducingSolver):
    """CBC: branch and cut in floating point, in a process of its own.

    Attributes:
        nodes: where no time limit is given, the most branch-and-bound nodes to open.
    """

    nodes: int = 5_000

    name: ClassVar[str] = "pulp"
    requires: ClassVar[tuple[str, ...]] = ("pulp",)

    @classmethod
    def cannot_run(cls) -> str | None:
        """CBC is a binary of its own, which not every build of PuLP brings."""
        if _cbc().available():
            return None
        return "PuLP is installed, but no CBC binary: pip install 'pulp[cbc]'"

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Run CBC to a gap of zero, or to its limit."""
        return search(core, self._attempt, value_limit=_VALUE_LIMIT, time_limit=time_limit)

    def _attempt(
        self, problem: KnapsackProblem, covers: Sequence[Cover], time_limit: float | None
    ) -> Attempt:
        pulp = _pulp()
        model = pulp.LpProblem("knapsack", pulp.LpMaximize)
        new = getattr(model, "add_variable", pulp.LpVariable)  # since and before PuLP 3.3
        picks = [new(f"x{i}", cat=pulp.LpBinary) for i in range(len(problem))]
        model += pulp.LpAffineExpression(list(zip(picks, problem.values, strict=True)))
        load = pulp.LpAffineExpression(list(zip(picks, problem.weights, strict=True)))
        model += load <= problem.capacity + 0.5
        for cover in covers:
            model += pulp.LpAffineExpression([(picks[i], 1) for i in cover.items]) <= cover.most

        with tempfile.TemporaryDirectory() as folder:
            nodes = self.nodes if time_limit is None else None
            cbc = _cbc(timeLimit=time_limit, maxNodes=nodes, gapRel=0.0, threads=1)
            cbc.tmpDir = folder
            model.solve(cbc)
        optimal = model.sol_status == pulp.LpSolutionOptimal
        upper = float(pulp.value(model.objective)) if optimal else float("inf")
        picked = tuple(i for i, x in enumerate(picks) if (x.varValue or 0.0) > 0.5)
        return Attempt(picked=picked, upper=upper, finished=optimal)


def _cbc(**options: Any) -> Any:
    """PuLP's CBC with its own binary, or with one on the path where PuLP brings none."""
    pulp = _pulp()
    own = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    return pulp.COIN_CMD(path=own, msg=False, **options)


def _pulp() -> Any:
    """Import PuLP without ``highspy``, unless somebody has imported that already."""
    if "pulp" in sys.modules or "highspy" in sys.modules:
        return importlib.import_module("pulp")
    sys.modules["highspy"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("pulp")
    finally:
        del sys.modules["highspy"]
