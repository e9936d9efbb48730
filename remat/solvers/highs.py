"""Call HiGHS, a solver of mixed-integer programs, and keep its messages off standard output."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from remat.solvers.interrupts import interruptible


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpResult:
    """Result of HiGHS on a mixed-integer program that minimises an objective.

    Attributes:
        x: values of the variables in the best solution found, as an array; None if none was found.
        bound: lower bound on the objective; minus infinity without a solution.
        infeasible: whether HiGHS proved that the program has no solution.
        by_clock: whether the time limit ended the search.
    """

    x: Any
    bound: float
    infeasible: bool
    by_clock: bool


def milp(
    cost: Any,
    rows: Any,
    *,
    low: Any = -math.inf,
    high: Any = math.inf,
    upper: Any = 1.0,
    integral: Any,
    gap: float = 0.0,
    nodes: int,
    time_limit: float | None,
) -> MilpResult:
    """Minimise ``cost @ x`` subject to ``low <= rows @ x <= high`` and ``0 <= x <= upper``.

    ``low``, ``high`` and ``upper`` are each one number for all rows or variables, or an array with a number
    for each. Ctrl-C ends the call at once, but HiGHS's thread runs on to its limit.

    Args:
        cost: one coefficient per variable.
        rows: the matrix of constraints, dense or sparse.
        integral: for each variable, whether its value is an integer.
        gap: difference between objective and bound at which to stop, as a fraction of the objective.
        nodes: the most branch-and-bound nodes to open if there is no time limit.
        time_limit: seconds after which HiGHS stops; None: the number of nodes is limited instead.
    """
    import numpy as np
    from scipy.sparse import csc_array

    binding = _binding()
    matrix = csc_array(rows)
    count, columns = matrix.shape
    program = binding.HighsLp()
    program.num_row_ = program.a_matrix_.num_row_ = count
    program.num_col_ = program.a_matrix_.num_col_ = columns
    program.a_matrix_.format_ = binding.MatrixFormat.kColwise
    program.a_matrix_.start_, program.a_matrix_.index_ = matrix.indptr, matrix.indices
    program.a_matrix_.value_ = matrix.data.astype(np.float64)
    program.col_cost_, program.col_lower_ = cost, np.zeros(columns)
    program.col_upper_ = np.broadcast_to(np.float64(upper), columns)
    program.row_lower_ = np.broadcast_to(np.float64(low), count)
    program.row_upper_ = np.broadcast_to(np.float64(high), count)
    program.integrality_ = [binding.HighsVarType(int(i)) for i in integral]
    # Not `highspy.Highs`: HiGHS 1.16 prints a header from its constructor, before the output can be turned off.
    engine = binding._Highs()
    engine.setOptionValue("output_flag", False)
    engine.setOptionValue("mip_rel_gap", gap)
    if time_limit is None:
        engine.setOptionValue("mip_max_nodes", nodes)
    else:
        engine.setOptionValue("time_limit", time_limit)
    engine.passModel(program)
    interruptible(engine.run)
    return _result(binding.HighsModelStatus, engine)


def _binding() -> Any:
    """Import HiGHS's Python module ``highspy``, or SciPy's copy of HiGHS if ``highspy`` is missing."""
    with contextlib.suppress(ImportError):
        # OR-Tools and `highspy` 1.15 each bring a library of the name `libhighs`, and the one loaded second fails.
        # OR-Tools comes first, because nothing replaces it.
        import ortools.graph.python.max_flow  # noqa: F401
    try:
        import highspy
    except ImportError:
        # Training images have SciPy, but often no `highspy`. HiGHS 1.12, which is in SciPy 1.17, prints a debug
        # line whatever its options.
        from scipy.optimize._highspy import _core

        return _core
    return highspy


def _result(statuses: Any, engine: Any) -> MilpResult:
    """Convert the result of a finished run of HiGHS to a `MilpResult`."""
    import numpy as np

    status, info = engine.getModelStatus(), engine.getInfo()
    ended = (statuses.kOptimal, statuses.kTimeLimit, statuses.kSolutionLimit)
    # At a limit without a solution, HiGHS returns arbitrary values and an infinite objective.
    has_solution = status in ended and math.isfinite(info.objective_function_value)
    return MilpResult(
        x=np.array(engine.getSolution().col_value) if has_solution else None,
        bound=info.mip_dual_bound if has_solution else -math.inf,
        infeasible=status == statuses.kInfeasible,
        by_clock=status == statuses.kTimeLimit,
    )
