"""What may be decided about one module: its Pareto-optimal sets of operators to store."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.errors import BudgetError, ProblemError
from remat.graph.costs.links import Link
from remat.sac.estimate.modules import ModuleTree
from remat.sac.estimate.stats import PS_PER_MS, SACStats, group
from remat.sac.estimate.tradeoff import as_knapsack
from remat.solvers.auto import Auto
from remat.solvers.base import Solver
from remat.solvers.frontier import knapsack_frontier
from remat.solvers.run import run

#: Choices for one module, at most; of more, some are considered, evenly by rank of memory.
MOST_CHOICES = 3_000
#: How often autograd saves a result, about: by who made it, and by who reads it. Each is a copy of its own.
_SAVED_TIMES = 2
#: Choices where a solver is asked for each.
ASKED = 24


def optimal_checkpointing_policy(
    sac_stats: SACStats, memory_budget: float, solver: Solver | None = None
) -> list[int]:
    """Which operators to store so that recomputing the others takes the least time.

    Args:
        sac_stats: the operators of the module.
        memory_budget: share of the module's memory that may be stored, 0 to 1.
        solver: any knapsack solver; `remat.solvers.auto.Auto` where None.

    Returns:
        For each operator, 1 if it is stored and 0 if it is recomputed. What must be stored (see
        `remat.sac.estimate.stats.group`) is.

    Raises:
        ProblemError: the budget is not between 0 and 1, or the statistics do not fit together.
        BudgetError: what must be stored is more than the budget; the message says by how much.
        SolverError: as from `remat.solve`.
    """
    if not isinstance(sac_stats, SACStats):
        raise ProblemError(
            f"sac_stats is a {type(sac_stats).__name__}; expected the SACStats of a module, for example "
            "from SACEstimator().sac_mod_stats"
        )
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, (int, float)):
        raise ProblemError(f"memory_budget must be a number from 0 to 1, got {memory_budget!r}")
    if not 0 <= memory_budget <= 1:
        raise ProblemError(f"memory_budget must be from 0 to 1, got {memory_budget}")
    nbytes, grouping = math.ceil(memory_budget * sum(sac_stats.memory)), group(sac_stats)
    least = sum(item.nbytes for item in grouping.stored)
    if least > nbytes:
        raise BudgetError(
            f"{nbytes} bytes may be stored, but {least} must be: operators that write to memory of "
            "the caller, and random ones where there is no input to compute them from again. Raise "
            f"the budget by {least - nbytes} bytes"
        )
    solution = run(Auto() if solver is None else solver, as_knapsack(grouping, nbytes - least))
    chosen = (*grouping.stored, *(grouping.free[i] for i in solution.saved))
    decided = [0] * len(sac_stats)
    for item in chosen:
        for i in item.ops:
            decided[i] = 1
    return decided


#: PyTorch's name for it.
get_optimal_checkpointing_policy_per_module = optimal_checkpointing_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChoice:
    """One way to checkpoint a module.

    Attributes:
        stored: its operators that are stored.
        kept_bytes: bytes of their results.
        recompute_ps: picoseconds that the others take, for each call.
        offloaded: whether nothing runs again, and all its results wait in the host's memory instead; then
            ``recompute_ps`` is what the copies take.
        slack_ps: by how many picoseconds omitted choices may be faster, at most, that keep at least as
            much, and less than the choice before; 0 where none is omitted.
    """

    stored: tuple[int, ...]
    kept_bytes: int
    recompute_ps: int
    slack_ps: int = 0
    offloaded: bool = False


def choices(
    stats: SACStats,
    most_kept: int,
    solver: Solver | None = None,
    overhead_ps: int = 0,
    link: Link | None = None,
) -> tuple[ModuleChoice, ...]:
    """The choices for a module that keep less than so many bytes of the device's memory, most bytes kept first.

    Args:
        stats: its operators.
        most_kept: bytes from which on checkpointing frees nothing.
        solver: who finds them; None: all that are Pareto-optimal, by `knapsack_frontier`.
        overhead_ps: picoseconds that running again takes besides, whatever is stored.
        link: the link to the host, where results may be offloaded.
    """
    found = _recomputing(stats, most_kept, solver, overhead_ps)
    if link is None or not found:
        return found
    return _with_offloading(stats, found, link)


def _with_offloading(
    stats: SACStats, found: tuple[ModuleChoice, ...], link: Link
) -> tuple[ModuleChoice, ...]:
    """The choices that are worth it beside sending everything to the host and fetching it again.

    That frees what running everything again frees, or more, and its copies stand in the way of nothing but
    themselves: each way is waited for. So it takes the place of all choices that are slower.
    """
    least = found[-1]
    copies_ps = 2 * _SAVED_TIMES * link.time_ps(sum(stats.memory))
    if copies_ps >= least.recompute_ps:
        return found
    faster = [c for c in found if c.recompute_ps < copies_ps]
    next_ps = found[len(faster)].recompute_ps - found[len(faster)].slack_ps
    slack_ps = max(0, copies_ps - next_ps)
    return (*faster, replace(least, recompute_ps=copies_ps, slack_ps=slack_ps, offloaded=True))


def _recomputing(
    stats: SACStats, most_kept: int, solver: Solver | None, overhead_ps: int
) -> tuple[ModuleChoice, ...]:
    grouping = group(stats)
    always = tuple(i for item in grouping.stored for i in item.ops)
    fixed = sum(item.nbytes for item in grouping.stored)
    views_ps = overhead_ps + sum(round(stats.runtimes[i] * PS_PER_MS) for i in grouping.recomputed)
    free_ps = sum(item.runtime_ps for item in grouping.free)
    room = most_kept - fixed - 1
    if room < 0:
        return ()
    problem = as_knapsack(grouping, room)
    frontier = knapsack_frontier(problem)
    most = MOST_CHOICES if solver is None else ASKED
    points = list(range(len(frontier)))
    if len(points) > most:
        points = sorted({round(k * (len(points) - 1) / (most - 1)) for k in range(most)})
    found: list[ModuleChoice] = []
    for point in points:
        if solver is None:
            picked = frontier.items(point)
        else:
            picked = run(solver, as_knapsack(grouping, int(frontier.weights[point]))).saved
        items = [grouping.free[i] for i in picked]
        choice = ModuleChoice(
            stored=tuple(sorted((*always, *(i for item in items for i in item.ops)))),
            kept_bytes=fixed + sum(item.nbytes for item in items),
            recompute_ps=views_ps + free_ps - sum(item.runtime_ps for item in items),
        )
        if not found or choice.recompute_ps < found[-1].recompute_ps:
            found.append(choice)
    found.reverse()
    if solver is None and len(points) == len(frontier) and frontier.tolerance == 0:
        return tuple(found)
    # Between two choices there may be others, each slower than the one that keeps more.
    tolerance = math.ceil(frontier.tolerance * free_ps)
    if solver is None:
        fastest = [*(p - 1 for p in points[1:]), len(frontier) - 1]
        faster = [views_ps + free_ps - int(frontier.values[p]) for p in reversed(fastest)]
    else:
        best = views_ps + free_ps - int(frontier.values[-1])
        faster = [best, *(c.recompute_ps for c in found[:-1])]
    return tuple(
        replace(c, slack_ps=c.recompute_ps - max(0, ps - tolerance))
        for c, ps in zip(found, faster, strict=True)
    )


def hull(choices: Sequence[ModuleChoice]) -> tuple[ModuleChoice, ...]:
    """The choices on the lower convex hull of memory and time."""
    found: list[ModuleChoice] = []
    for c in choices:
        while len(found) > 1 and _above(found[-2], found[-1], c):
            found.pop()
        found.append(c)
    return tuple(found)


def _above(a: ModuleChoice, b: ModuleChoice, c: ModuleChoice) -> bool:
    """Whether ``b`` lies on or above the line from ``a`` to ``c``."""
    return (b.recompute_ps - a.recompute_ps) * (a.kept_bytes - c.kept_bytes) >= (
        c.recompute_ps - a.recompute_ps
    ) * (a.kept_bytes - b.kept_bytes)


def candidates(
    tree: ModuleTree, units: Sequence[str] | None = None, fsdp_units: Sequence[str] = ()
) -> tuple[int, ...]:
    """Positions of the modules that may be checkpointed.

    Leaves may not, nor the model itself: where all of it runs again at the start of backward, the
    step needs what it needed before.

    Args:
        tree: the modules.
        units: names, or patterns such as ``model.layers.*``, of those that may be; None: all.
        fsdp_units: names or patterns of what FSDP gathers as one; nothing that contains one of them
            may be checkpointed.

    Raises:
        ProblemError: a name is no module's, or a name without a pattern is of one that cannot be.
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
    return tuple(
        k for k, m in enumerate(tree.modules) if k in wanted and k not in above and m.can_run_again
    )


def _matching(tree: ModuleTree, patterns: Sequence[str], what: str) -> set[int]:
    if isinstance(patterns, str):
        raise ProblemError(
            f"{what} is the text {patterns!r}; expected names, such as [{patterns!r}]"
        )
    found: set[int] = set()
    for pattern in patterns:
        hits = [k for k, m in enumerate(tree.modules) if fnmatch.fnmatchcase(m.fqn, pattern)]
        if not hits:
            some = ", ".join(m.fqn for m in tree.modules if m.fqn and not m.is_leaf)[:200]
            raise ProblemError(f"{what}: no module is called '{pattern}'; there are: {some}")
        found.update(hits)
    return found
