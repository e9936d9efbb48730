"""Solve knapsacks with HiGHS.

HiGHS computes in floating point. `remat.solvers.knapsack.tolerances` repairs HiGHS's choice in integers,
and loosens HiGHS's bound by the possible rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat.solvers.highs import milp
from remat.solvers.knapsack.tolerances import ToleranceSolver
from remat.solvers.problem import KnapsackProblem


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Milp(ToleranceSolver):
    """Solver that runs HiGHS, a branch and cut in floating point, and checks and repairs the answer in integers.

    Attributes:
        nodes: the most branch-and-bound nodes to open if there is no time limit.
    """

    nodes: int = 20_000

    name: ClassVar[str] = "milp"
    requires: ClassVar[tuple[str, ...]] = ("scipy", "numpy")

    def attempt(
        self, problem: KnapsackProblem, time_limit: float | None
    ) -> tuple[tuple[int, ...], float]:
        """Run HiGHS to proven optimality or to the time limit; without a time limit, to a limit on search nodes."""
        import numpy as np

        result = milp(
            -np.array(problem.values, dtype=np.float64),
            [problem.weights],
            # Half a unit, so that rounding does not exclude a choice that fills the capacity exactly.
            high=problem.capacity + 0.5,
            integral=np.ones(len(problem)),
            nodes=self.nodes,
            time_limit=time_limit,
        )
        picked = () if result.x is None else tuple(np.flatnonzero(result.x > 0.5).tolist())
        return picked, -result.bound
