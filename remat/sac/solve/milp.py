"""Plan which modules of a model to checkpoint: an integer program selects the results that each module stores."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from remat.errors import BudgetError, ProblemError
from remat.graph.costs import CostModel
from remat.plugins.registry import registry
from remat.sac.estimation.modules import ModuleStats, ModuleTree, estimate
from remat.sac.estimation.stats import PS_PER_MS
from remat.sac.solve.choices import StoredSet, candidates, empty_set, stored_sets
from remat.sac.solve.peaks import Decision, simulate
from remat.sac.solve.plan import ModulePlan, SACPlan
from remat.sac.solve.program import least_time
from remat.solvers.run import check_time_limit
from remat.units import Budget

#: Relative optimality gap at which the integer program stops. The error of estimated times is larger than this gap.
GAP = 0.005


def plan(
    model: nn.Module | ModuleTree,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: int | float | str,
    mode: str = "operator-level-cost-model",
    cost: str | CostModel | None = None,
    fake: bool | None = None,
    units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] = (),
    world_size: int = 1,
    time_limit: float | None = None,
    gap: float = GAP,
) -> SACPlan:
    """Choose which modules to checkpoint, and which results each stores, to fit a step into memory.

    A result is what an operator of a module returns. Among all plans that fit, the returned plan has the least
    recompute time, within the relative tolerance ``gap``. For each module that may be checkpointed, there are several
    Pareto-optimal sets of results to store. An integer program selects one of these sets, or leaves the module without
    checkpointing. The plan's peak comes from a simulation of the step (`remat.sac.solve.peaks`).

    Args:
        model: the model in train mode, or the result of `estimate`. With that result, planning for
            another budget needs no new estimate.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        memory: budget for the step's peak, including parameters and gradients: ``"12GiB"``, an int of
            bytes, or a fraction of the peak without checkpointing, from 0 to 1.
        mode: ``"operator-level-cost-model"`` takes runtimes from a cost model,
            ``"operator-level-benchmark"`` measures them; see `SACEstimator`.
        cost: name or instance of a cost model to use instead of the mode's own: ``"roofline:h100"``.
        fake: whether the step runs on fake tensors, which need neither memory nor a GPU. None: use fake
            tensors unless all parameters, buffers and inputs are on the CPU.
        units: names or patterns of the modules that may be checkpointed; None: all modules.
        fsdp_units: names or patterns of the modules whose parameters FSDP gathers as one unit. A module
            that contains an FSDP unit is not checkpointed.
        world_size: number of ranks over which parameters and gradients are sharded.
        time_limit: time limit of the integer program in seconds; None: a limit on branch-and-bound nodes.
        gap: relative optimality gap at which the integer program may stop; 0: only at a proven optimum.

    Returns:
        The plan, for `apply`.

    Raises:
        BudgetError: ``memory`` cannot be parsed, or no plan fits the budget. In the latter case, the
            message states the least peak.
        ProblemError: another argument is invalid, or a module cannot be estimated.
        CaptureError: ``args`` is not a tuple, ``kwargs`` is not a dict, or no output requires a gradient.
    """
    registry().learn_operators()
    budget = read_memory(memory)  # parsed early, so that a typing error is found at once
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ProblemError(f"world_size must be 1 or more ranks, got {world_size!r}")
    if not 0 <= gap < 1:
        raise ProblemError(f"gap must be at least 0 and below 1, got {gap!r}")
    check_time_limit(time_limit)
    tree = model
    if not isinstance(tree, ModuleTree):
        tree = estimate(tree, args, kwargs, mode=mode, cost=cost, fake=fake)
    deadline = None if time_limit is None else time.monotonic() + time_limit
    plain, peak = tree.memory(world_size), tree.peak_bytes(world_size)
    memory_bytes = int(budget * peak) if isinstance(budget, float) else budget
    positions = candidates(tree, units, fsdp_units)
    decision: Decision = {}
    bound_ps = 0.0
    if peak > memory_bytes:
        options = _options(tree, positions)
        decision, bound_ps = least_time(
            tree, options, plain, memory_bytes, gap=gap, deadline=deadline
        )
        decision = {k: _without_policy(tree, k, c, gap) for k, c in decision.items()}
    modules = [
        _module_plan(tree.modules[k], decision[k])
        for k in sorted(decision, key=lambda k: tree.modules[k].calls[0].begin)
    ]
    spent_ps = sum(c.recompute_ps * len(tree.modules[k].calls) for k, c in decision.items())
    return SACPlan(
        modules=tuple(modules),
        budget_bytes=memory_bytes,
        peak_bytes=simulate(tree, decision, plain).peak_bytes,
        plain_peak_bytes=peak,
        recompute_ms=spent_ps / PS_PER_MS,
        step_ms=tree.step_ms,
        # HiGHS's bound is inexact. A lower bound above the cost of this plan would be wrong.
        bound_ms=float(min(bound_ps, spent_ps)) / PS_PER_MS,
        world_size=world_size,
        solver="highs",
        mode=tree.mode,
    )


def read_memory(memory: object) -> int | float:
    """Parse a memory budget into bytes (int) or a ratio of the peak (float); raise a BudgetError if it is neither."""
    with contextlib.suppress(BudgetError):
        budget = Budget.parse(memory)
        if budget.peak_bytes is not None:
            return budget.peak_bytes
        if budget.share is not None:
            return float(budget.share)
    raise BudgetError(
        f"memory is {memory!r}; expected bytes: an int above 1, or text like '40GiB' or '512MB'; or a number "
        "from 0 to 1, the ratio of the peak without checkpointing"
    )


def _without_policy(tree: ModuleTree, k: int, stored_set: StoredSet, gap: float) -> StoredSet:
    """Return ``stored_set``, or an empty set if storing no results takes hardly more recompute time."""
    # A policy runs Python code for every operator. A set must therefore save more recompute time than its policy
    # takes, if measured, and more than the program's gap. Plain checkpointing stores no results, so memory does not
    # grow.
    module = tree.modules[k]
    plain = empty_set(module.operators)
    if plain is None:
        return stored_set
    policy_ps = tree.policy_ms * PS_PER_MS * len(module.operators)
    worth_ps = max(policy_ps, gap * stored_set.recompute_ps)
    return plain if plain.recompute_ps - stored_set.recompute_ps <= worth_ps else stored_set


def _options(tree: ModuleTree, positions: Sequence[int]) -> dict[int, tuple[StoredSet, ...]]:
    """Return a dict from the position of each module that can free memory to the sets of results that it may store."""
    cached: dict[tuple[int, str], tuple[StoredSet, ...]] = {}
    options: dict[int, tuple[StoredSet, ...]] = {}
    for k in positions:
        module = tree.modules[k]
        stats = module.operators
        # The mean over the calls is taken, because all calls of a module store the same set of results.
        most = sum(c.freeable_bytes for c in module.calls) // len(module.calls)
        key = (most, repr(stats))  # mutable statistics have no hash
        if key not in cached:
            cached[key] = stored_sets(stats, most)
        if cached[key]:
            options[k] = cached[key]
    return options


def _module_plan(module: ModuleStats, stored_set: StoredSet) -> ModulePlan:
    """Build the plan of one module, which stores the given results."""
    stats = module.operators
    return ModulePlan(
        name=module.fqn,
        ops=tuple(stats.func_names),
        stored=stored_set.stored,
        stored_bytes=stored_set.kept_bytes,
        discarded_bytes=sum(stats.memory) - stored_set.kept_bytes,
        recompute_ms=stored_set.recompute_ps / PS_PER_MS,
    )
