"""HiGHS, through ``scipy.optimize.milp``.

HiGHS computes in floating point. At byte-size weights a variable that is 1 within its tolerance
can hide hundreds of bytes, and a bound can be wrong in its ninth digit. So the capacity gets half a
unit of margin, the choice is repaired in integers, and the bound is only as sharp as doubles
justify.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from remat.solvers.bounds import relax
from remat.solvers.doubles import Scaled, repair, scale_down
from remat.solvers.problem import KnapsackProblem
from remat.solvers.quiet import quiet_stdout
from remat.solvers.reduction import ReducingSolver
from remat.solvers.solution import Answer

_SUM_LIMIT = 2**52
_RELATIVE_TRUST = 1e-7  # of HiGHS's bound; measured against exact optima, errors reach 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Milp(ReducingSolver):
    """HiGHS: branch and cut in floating point, checked and repaired in integers.

    Attributes:
        nodes: where no time limit is given, the most branch-and-bound nodes to open.
    """

    nodes: int = 20_000

    name: ClassVar[str] = "milp"
    requires: ClassVar[tuple[str, ...]] = ("scipy", "numpy")

    def solve_core(self, core: KnapsackProblem, *, time_limit: float | None) -> Answer:
        """Run HiGHS to a gap of zero, or to its limit."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        scaled = scale_down(core, _SUM_LIMIT)
        program = scaled.problem
        limit = {"node_limit": self.nodes} if time_limit is None else {"time_limit": time_limit}
        with quiet_stdout(noise="HighsMipSolverData::"):
            result = milp(
                -np.array(program.values, dtype=np.float64),
                constraints=LinearConstraint(
                    np.array([program.weights], dtype=np.float64), ub=program.capacity + 0.5
                ),
                integrality=np.ones(len(program)),
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": 0.0, **limit},
            )
        relaxed = relax(core)
        saved = relaxed.saved
        if result.x is not None:
            found = repair(core, np.flatnonzero(result.x > 0.5).tolist())
            if core.value_of(found) > relaxed.value:
                saved = found
        value = core.value_of(saved)
        bound = min(relaxed.bound, trusted_bound(scaled, result.mip_dual_bound, value))
        return Answer(saved, bound, by_clock=bound > value and time_limit is not None)


def trusted_bound(scaled: Scaled, claimed: float | None, value: int) -> int:
    """Make an integer bound of a float one that was minimised, never sharper than justified."""
    nothing = scaled.problem.total_value if scaled.exact else 2**63
    if claimed is None or not math.isfinite(claimed) or not scaled.exact:
        return nothing
    upper = -claimed
    return max(value, math.floor(upper + max(0.5, abs(upper) * _RELATIVE_TRUST)))
