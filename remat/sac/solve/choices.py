"""Find the sets of results that a checkpointed module may store, and the modules that may be checkpointed."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat.errors import BudgetError, ProblemError
from remat.sac.estimation.modules import ModuleTree
from remat.sac.estimation.stats import Grouping, Item, SACStats, group
from remat.sac.estimation.tradeoff import as_knapsack
from remat.solvers.auto import Auto
from remat.solvers.base import Solver
from remat.solvers.graph.pareto import lower_hull
from remat.solvers.knapsack.frontier import KnapsackFrontier, knapsack_frontier
from remat.solvers.run import run

#: Largest number of stored sets among which the integer program chooses for one module. More sets take HiGHS longer.
MOST_SETS = 40


def get_optimal_checkpointing_policy_per_module(
    sac_stats: SACStats, memory_budget: float, solver: Solver | None = None
) -> list[int]:
    """Choose the operators whose results a module stores within a budget, such that recomputation takes least time.

    Args:
        sac_stats: statistics of the module's operators.
        memory_budget: fraction of the module's memory that may be stored, from 0 to 1.
        solver: a knapsack solver; None: `remat.solvers.auto.Auto`.

    Returns:
        For each operator, 1 if its result is stored and 0 if it is recomputed. Operators that must be
        stored (see `remat.sac.estimation.stats.group`) always have 1.

    Raises:
        ProblemError: the budget is not a number from 0 to 1, or the statistics are inconsistent.
        BudgetError: the results that must be stored exceed the budget; the message states by how much.
        SolverError: the solver fails, as in `remat.solve`.
    """
    if not isinstance(sac_stats, SACStats):
        raise ProblemError(
            f"sac_stats is a {type(sac_stats).__name__}; expected the SACStats of a module, for example "
            "from SACEstimator().sac_mod_stats"
        )
    is_number = isinstance(memory_budget, (int, float)) and not isinstance(memory_budget, bool)
    if not is_number or not 0 <= memory_budget <= 1:
        raise ProblemError(f"memory_budget must be a number from 0 to 1, got {memory_budget!r}")
    nbytes, grouping = math.ceil(memory_budget * sum(sac_stats.memory)), group(sac_stats)
    least = sum(item.nbytes for item in grouping.stored)
    if least > nbytes:
        raise BudgetError(
            f"{nbytes} bytes may be stored, but {least} must be: operators that write to memory of "
            "the caller, and random ones where there is no input to compute them from again. Raise "
            f"the budget by {least - nbytes} bytes"
        )
    solution = run(Auto() if solver is None else solver, as_knapsack(grouping, nbytes - least))
    stored = set(_stored_set(grouping, [grouping.free[i] for i in solution.saved]).stored)
    return [int(i in stored) for i in range(len(sac_stats))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """Set of operators whose results a checkpointed module stores, with the stored bytes and the recompute time.

    Attributes:
        stored: positions of the operators in `SACStats.func_names`.
        kept_bytes: bytes of the stored results.
        recompute_ps: picoseconds of recomputation for each call of the module.
    """

    stored: tuple[int, ...]
    kept_bytes: int
    recompute_ps: int


def stored_sets(stats: SACStats, most_kept: int) -> tuple[StoredSet, ...]:
    """Return the sets of operators whose results a module may store, most stored bytes first.

    The sets are points of the module's exact Pareto frontier of stored bytes and recompute time.

    Args:
        stats: statistics of the module's operators.
        most_kept: bytes that checkpointing frees if no results are stored. Each set has fewer bytes.
    """
    grouping = group(stats)
    fixed = sum(item.nbytes for item in grouping.stored)
    room = most_kept - fixed - 1  # a stored set of `most_kept` bytes frees no memory
    if room < 0:
        return ()
    frontier = knapsack_frontier(as_knapsack(grouping, room))
    return tuple(
        _stored_set(grouping, [grouping.free[i] for i in frontier.items(point)])
        for point in reversed(_points(frontier, MOST_SETS))
    )


def empty_set(stats: SACStats) -> StoredSet | None:
    """Return the choice to store no results, as in plain checkpointing; None if some results must be stored."""
    grouping = group(stats)
    return None if grouping.stored else _stored_set(grouping, ())


def _stored_set(grouping: Grouping, picked: Sequence[Item]) -> StoredSet:
    """Return the set of all operators in the picked items and in the items that are always stored."""
    items = (*grouping.stored, *picked)
    return StoredSet(
        stored=tuple(sorted(i for item in items for i in item.ops)),
        kept_bytes=sum(item.nbytes for item in items),
        recompute_ps=grouping.recompute_ps - sum(item.runtime_ps for item in picked),
    )


def _points(frontier: KnapsackFrontier, most: int) -> list[int]:
    """Return the sorted positions of at most ``most`` points of a frontier; points on the hull take precedence."""
    count = len(frontier)
    if count <= most:
        return list(range(count))
    # Python's integers are used, because products of bytes and picoseconds exceed 64 bits.
    weights, values = frontier.weights.tolist(), frontier.values.tolist()
    on_hull = lower_hull(range(count), lambda point: (weights[point], -values[point]))
    # The linear relaxation of the integer program uses points on the hull. The remaining points lie between
    # points on the hull, so that a plan can use more of its budget.
    selected = {on_hull[i] for i in _evenly(len(on_hull), most)}
    return sorted(selected.union(_evenly(count, max(0, most - len(selected)))))


def _evenly(count: int, most: int) -> set[int]:
    """Return at most ``most`` numbers of ``range(count)``, evenly spaced from 0 to ``count - 1``."""
    if most < 2 or count <= most:
        return set(range(min(count, most)))
    return {round(i * (count - 1) / (most - 1)) for i in range(most)}


def candidates(
    tree: ModuleTree, units: Sequence[str] | None = None, fsdp_units: Sequence[str] = ()
) -> tuple[int, ...]:
    """Return the positions in ``tree.modules`` of the modules that may be checkpointed.

    Modules without children and the model itself are excluded.

    Args:
        tree: the modules.
        units: names, or patterns such as ``model.layers.*``, of the modules that may be checkpointed;
            None: all modules.
        fsdp_units: names or patterns of the modules whose parameters FSDP gathers as one unit. A module
            that contains an FSDP unit may not be checkpointed.

    Raises:
        ProblemError: a name or pattern matches no module, or a module named in ``units`` cannot be
            checkpointed.
    """
    names = [m.fqn for m in tree.modules]
    wanted = set(range(len(names))) if units is None else _matching(tree, units, "units")
    above: set[int] = set()
    for k in sorted(_matching(tree, fsdp_units, "fsdp_units")):
        above.update(tree.ancestors(k))
    for unit in units or ():
        if unit in names:
            module = tree[unit]
            why = module.why_not or ("it is the whole model" if not module.fqn else "")
            if why:
                raise ProblemError(f"module '{unit}' cannot be checkpointed: {why}")
    # The model itself is excluded: if it ran again at the start of backward, the peak would stay the same.
    return tuple(
        k for k, m in enumerate(tree.modules) if k in wanted and k not in above and m.can_run_again
    )


def _matching(tree: ModuleTree, patterns: Sequence[str], argument: str) -> set[int]:
    """Return the positions of the modules that match names or patterns; ``argument`` names the patterns in errors."""
    if isinstance(patterns, str):
        raise ProblemError(
            f"{argument} is the text {patterns!r}; expected names, such as [{patterns!r}]"
        )
    positions: set[int] = set()
    for pattern in patterns:
        hits = [k for k, m in enumerate(tree.modules) if fnmatch.fnmatchcase(m.fqn, pattern)]
        if not hits:
            some = ", ".join(m.fqn for m in tree.modules if m.fqn and not m.is_leaf)[:200]
            raise ProblemError(f"{argument}: no module is called '{pattern}'; there are: {some}")
        positions.update(hits)
    return positions
