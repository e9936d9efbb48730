"""CBC, through PuLP and the binary that it brings."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

from remat.solvers.bounds import relax
from remat.solvers.doubles import repair, scale_down
from remat.solvers.milp import trusted_bound
from remat.solvers.problem import KnapsackProblem
from remat.solvers.reduction import ReducingSolver
from remat.solvers.solution import Answer

_SUM_LIMIT = 10**12  # PuLP hands numbers over as text with 12 digits after the first


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PulpCbc(ReducingSolver):
    """CBC: branch and cut in floating point, in a process of its own.

    Attributes:
        nodes: where no time limit is given, the most branch-and-bound nodes to open.
    """

    nodes: int = 20_000

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
        import pulp

        scaled = scale_down(core, _SUM_LIMIT)
        program = scaled.problem
        model = pulp.LpProblem("knapsack", pulp.LpMaximize)
        new = getattr(model, "add_variable", pulp.LpVariable)  # before and after PuLP 3.3
        picks = [new(f"x{i}", cat=pulp.LpBinary) for i in range(len(program))]
        model += pulp.LpAffineExpression(list(zip(picks, program.values, strict=True)))
        load = pulp.LpAffineExpression(list(zip(picks, program.weights, strict=True)))
        model += load <= program.capacity + 0.5

        with tempfile.TemporaryDirectory() as folder:
            cbc = _cbc(
                timeLimit=time_limit,
                maxNodes=self.nodes if time_limit is None else None,
                gapRel=0.0,
                threads=1,
            )
            cbc.tmpDir = folder
            model.solve(cbc)

        relaxed = relax(core)
        saved = relaxed.saved
        found = repair(core, [i for i, x in enumerate(picks) if (x.varValue or 0.0) > 0.5])
        if core.value_of(found) > relaxed.value:
            saved = found
        value, bound = core.value_of(saved), relaxed.bound
        if model.sol_status == pulp.LpSolutionOptimal:  # CBC tells PuLP no other bound
            claimed = -float(pulp.value(model.objective))  # of its own choice, unrepaired
            bound = min(bound, trusted_bound(scaled, claimed, value))
        return Answer(saved, bound, by_clock=bound > value and time_limit is not None)


def _cbc(**options: Any) -> Any:
    """PuLP's CBC with its own binary, or with one on the path where PuLP brings none."""
    import pulp

    own = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    return pulp.COIN_CMD(path=own, msg=False, **options)
