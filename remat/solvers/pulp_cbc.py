"""Solver of knapsacks with CBC, whose binary comes with PuLP.

CBC computes in floating point, as HiGHS does. PuLP writes numbers with thirteen digits, so
the sums are kept below that length. PuLP does not return a bound, only whether the answer is
optimal.

PuLP imports ``highspy`` if it is installed. The ``libhighs`` libraries of ``highspy`` and OR-Tools
have the same name, and the one loaded second fails. remat needs OR-Tools, so `load_pulp` keeps PuLP
from importing ``highspy``.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from remat.solvers.problem import KnapsackProblem
from remat.solvers.tolerances import Attempt, ToleranceSolver


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PulpCbc(ToleranceSolver):
    """CBC: branch and cut in floating point, in a process of its own.

    Attributes:
        nodes: the most branch-and-bound nodes to open if there is no time limit.
    """

    nodes: int = 5_000

    name: ClassVar[str] = "pulp"
    requires: ClassVar[tuple[str, ...]] = ("pulp",)
    value_limit: ClassVar[int] = 10**12

    @classmethod
    def cannot_run(cls) -> str | None:
        """Return why CBC cannot run; None if PuLP finds CBC's binary, which some builds lack."""
        if _engine().available():
            return None
        return "PuLP is installed, but no CBC binary: pip install 'pulp[cbc]'"

    def attempt(self, problem: KnapsackProblem, time_limit: float | None) -> Attempt:
        """Run the solver to proven optimality, or until its limit on time or nodes."""
        started = time.monotonic()
        pulp = load_pulp()
        model = pulp.LpProblem("knapsack", pulp.LpMaximize)
        new = getattr(model, "add_variable", pulp.LpVariable)  # `add_variable` came with PuLP 3.3
        picks = [new(f"x{i}", cat=pulp.LpBinary) for i in range(len(problem))]
        model += pulp.LpAffineExpression(list(zip(picks, problem.values, strict=True)))
        load = pulp.LpAffineExpression(list(zip(picks, problem.weights, strict=True)))
        # Half a unit of margin, so that rounding cannot cut off a choice that fills the capacity exactly.
        model += load <= problem.capacity + 0.5
        with tempfile.TemporaryDirectory() as folder:
            limits: dict[str, Any] = {"maxNodes": self.nodes}
            if time_limit is not None:
                left = time_limit - (time.monotonic() - started)
                limits = {"timeLimit": max(0.01, left)}
            engine = _engine(gapRel=0.0, **limits)
            engine.tmpDir = folder
            model.solve(engine)
        optimal = model.sol_status == pulp.LpSolutionOptimal
        upper = float(pulp.value(model.objective)) if optimal else float("inf")
        picked = tuple(i for i, x in enumerate(picks) if (x.varValue or 0.0) > 0.5)
        return Attempt(picked=picked, upper=upper)


def _engine(**options: Any) -> Any:
    """Create a PuLP object that runs CBC: PuLP's own binary or, without one, a binary on the search path."""
    pulp = load_pulp()
    # A path of None makes PuLP look for CBC on the search path. Pass no number of threads: CBC uses one thread by
    # default, and with an explicit number it may sleep ten seconds at the end.
    own = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    return pulp.COIN_CMD(path=own, msg=False, **options)


def load_pulp() -> Any:
    """Import PuLP without ``highspy``, unless ``highspy`` is already imported."""
    if "pulp" in sys.modules or "highspy" in sys.modules:
        return importlib.import_module("pulp")
    # None makes `import highspy` fail.
    sys.modules["highspy"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("pulp")
    finally:
        del sys.modules["highspy"]
