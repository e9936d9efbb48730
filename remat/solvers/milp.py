"""HiGHS, through ``scipy.optimize.milp``.

HiGHS computes in floating point. The capacity gets half a unit of margin, so that a choice that
fills it exactly is not cut off; what is chosen is checked and completed in integers; its bound
counts only as far as doubles justify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.solvers.cover_cuts import Attempt, Cover, ToleranceSolver
from remat.solvers.highs import milp
from remat.solvers.problem import KnapsackProblem


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Milp(ToleranceSolver):
    """HiGHS: branch and cut in floating point, checked and repaired in integers.

    Attributes:
        nodes: where no time limit is given, the most branch-and-bound nodes to open.
    """

    nodes: int = 20_000

    name: ClassVar[str] = "milp"
    requires: ClassVar[tuple[str, ...]] = ("scipy", "numpy")

    def attempt(
        self, problem: KnapsackProblem, covers: Sequence[Cover], time_limit: float | None
    ) -> Attempt:
        """Run it to a gap of zero, or to its limit."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint

        rows = np.zeros((1 + len(covers), len(problem)))
        rows[0] = problem.weights
        for row, cover in zip(rows[1:], covers, strict=True):
            row[list(cover.items)] = 1.0
        limit = {"node_limit": self.nodes} if time_limit is None else {"time_limit": time_limit}
        most = [problem.capacity + 0.5, *(cover.most for cover in covers)]
        result = milp(
            -np.array(problem.values, dtype=np.float64),
            constraints=LinearConstraint(rows, ub=most),
            integrality=np.ones(len(problem)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0, **limit},
        )
        picked = () if result.x is None else tuple(np.flatnonzero(result.x > 0.5).tolist())
        bound = result.mip_dual_bound
        upper = float("inf") if bound is None else -bound
        return Attempt(picked=picked, upper=upper, finished=result.status == 0)
