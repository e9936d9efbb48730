"""Solve knapsacks with CBC, which is called through PuLP 2.8 to 4.

CBC's binary is that of the package ``cbcbox``, which ``pulp[cbc]`` installs. Without ``cbcbox``, CBC's
binary is the one that comes with PuLP up to version 3, or one on the search path.

CBC computes in floating point, as HiGHS does. PuLP writes numbers with thirteen digits, so the sums of
weights and values are kept below thirteen digits. PuLP does not return a bound, only whether the answer
is optimal.

PuLP imports the modules of other solvers, and `load_pulp` prevents these imports. Importing CP-SAT imports pandas,
which doubles the time of PuLP's import. After an import of some versions of ``highspy``, OR-Tools cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from remat.solvers.knapsack.tolerances import ToleranceSolver
from remat.solvers.problem import KnapsackProblem

#: Modules of other solvers, which PuLP imports if it can.
_UNNEEDED = ("highspy", "ortools.sat.python.cp_model")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PulpCbc(ToleranceSolver):
    """Solver that runs CBC, a branch and cut in floating point, in a process of its own.

    Attributes:
        nodes: the most branch-and-bound nodes to open if there is no time limit.
    """

    nodes: int = 5_000

    name: ClassVar[str] = "pulp"
    requires: ClassVar[tuple[str, ...]] = ("pulp",)
    value_limit: ClassVar[int] = 10**12

    @classmethod
    def cannot_run(cls) -> str | None:
        """Return why CBC cannot run; None if PuLP finds CBC's binary, which some builds of PuLP lack."""
        # Look for `cbcbox` first: every plan calls this method, and the import of PuLP 4 takes 0.2 s.
        if importlib.util.find_spec("cbcbox") or _engine().available():
            return None
        return "PuLP is installed, but no CBC binary: pip install 'pulp[cbc]'"

    def attempt(
        self, problem: KnapsackProblem, time_limit: float | None
    ) -> tuple[tuple[int, ...], float]:
        """Run CBC to proven optimality, or until its limit on time or nodes."""
        started = time.monotonic()
        pulp = load_pulp()
        model = pulp.LpProblem("knapsack", pulp.LpMaximize)
        new = getattr(model, "add_variable", pulp.LpVariable)  # `add_variable` came with PuLP 3.3
        picks = [new(f"x{i}", cat=pulp.LpBinary) for i in range(len(problem))]
        # PuLP 4 has `from_list`, and its constructor accepts a list that fails later.
        linear = getattr(pulp.LpAffineExpression, "from_list", pulp.LpAffineExpression)
        model += linear(list(zip(picks, problem.values, strict=True)))
        load = linear(list(zip(picks, problem.weights, strict=True)))
        # Half a unit of margin, so that rounding cannot cut off a choice that fills the capacity exactly.
        model += load <= problem.capacity + 0.5
        with tempfile.TemporaryDirectory() as folder:
            limits: dict[str, Any] = {"maxNodes": self.nodes}
            if time_limit is not None:
                left = time_limit - (time.monotonic() - started)
                limits = {"timeLimit": max(0.01, left)}
            engine = _engine(gapRel=0.0, **limits)
            engine.tmpDir = folder
            outcome = model.solve(engine)
        optimal = _is_optimal(pulp, model, outcome)
        upper = float(pulp.value(model.objective)) if optimal else float("inf")
        picked = tuple(i for i, x in enumerate(picks) if (x.varValue or 0.0) > 0.5)
        return picked, upper


def _is_optimal(pulp: Any, model: Any, outcome: Any) -> bool:
    """Return whether CBC proved its answer optimal; ``outcome`` is the result of ``model.solve``."""
    if hasattr(pulp, "LpSolveStatus"):  # PuLP 4 returns statistics
        # CBC reports that the gap was reached, instead of an optimum, even if the gap is zero.
        return outcome.status in (pulp.LpSolveStatus.Optimal, pulp.LpSolveStatus.GapLimit)
    # PuLP 2 and 3 return "optimal" for an answer at a limit, too.
    return bool(model.sol_status == pulp.LpSolutionOptimal)


def _engine(**options: Any) -> Any:
    """Create a PuLP object that runs CBC."""
    pulp = load_pulp()
    if importlib.util.find_spec("cbcbox"):
        path = importlib.import_module("cbcbox").cbc_bin_path()
    else:
        path = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    # A path of None makes PuLP look for CBC on the search path. Pass no number of threads: CBC uses one thread by
    # default, and with an explicit number it may sleep ten seconds at the end.
    return pulp.COIN_CMD(path=path, msg=False, **options)


def load_pulp() -> Any:
    """Import PuLP without the modules of other solvers, which PuLP then reports as unavailable."""
    if "pulp" in sys.modules:
        return sys.modules["pulp"]
    hidden = [name for name in _UNNEEDED if name not in sys.modules]
    # None makes the import of a module fail.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        return importlib.import_module("pulp")
    finally:
        for name in hidden:
            del sys.modules[name]
