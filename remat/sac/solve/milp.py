"""Which modules to checkpoint and what each of them stores: a mixed-integer program over the whole model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from remat.errors import ProblemError, SolverError
from remat.graph.costs.links import Link
from remat.sac.estimate.modules import ModuleTree
from remat.sac.estimate.stats import PS_PER_MS
from remat.sac.run.lifetimes import Ints
from remat.sac.solve.choices import ModuleChoice, candidates, choices
from remat.sac.solve.module_classes import Decision
from remat.sac.solve.peaks import simulate
from remat.sac.solve.plan import ModulePlan, SACPlan
from remat.sac.solve.program import BACKENDS, Backend
from remat.sac.solve.search import Outcome, PlanSearch
from remat.solvers.base import Solver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.pulp_cbc import PulpCbc
from remat.solvers.run import check_time_limit


def plan_modules(
    tree: ModuleTree,
    memory_bytes: int,
    *,
    world_size: int = 1,
    units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] = (),
    backend: str | None = None,
    solver: Solver | None = None,
    time_limit: float | None = None,
    gap: float = 0.0,
    link: Link | None = None,
) -> SACPlan:
    """Chooses the modules to checkpoint, and the operators that each stores.

    The peak of the step stays within the budget at the least recompute time. No module within a
    checkpointed one is checkpointed, no leaf is, and nothing that contains an FSDP unit. Each module
    offers all its Pareto-optimal sets of operators to store, so that what is chosen is a set and no
    fraction of memory; equal modules are counted instead of told apart (`remat.sac.solve.cuts`), and what
    comes out is simulated moment by moment (`remat.sac.solve.peaks`).

    Args:
        tree: the modules.
        memory_bytes: bytes that the step may take, parameters and gradients included.
        world_size: ranks that parameters and gradients are spread over, by FSDP. What FSDP gathers
            for a moment is not counted.
        units: names or patterns of the modules that may be checkpointed; None: all.
        fsdp_units: names or patterns of the modules that FSDP gathers as one.
        backend: who solves the program where merging alone does not: ``"cbc"``, or PuLP's name of
            another solver; None: HiGHS, through SciPy.
        solver: who decides within a module, at some budgets; None: every best choice is known.
        time_limit: seconds; without it, work is counted.
        gap: relative gap at which the program may stop; 0: never before the best.
        link: the link to the host, where modules may be offloaded instead of run again.

    Raises:
        ProblemError: an argument is not what it must be, or names no module.
        BudgetError: no plan fits; the message says what would, and by how much the budget is short.
        SolverError: PuLP has no such solver here, or it ended without an answer.
    """
    _check(memory_bytes, world_size, backend, time_limit, gap)
    started = time.monotonic()
    plain = tree.memory(world_size)
    chosen = candidates(tree, units, fsdp_units)
    hopeful = [k for k in chosen if not _hopeless(tree, k, chosen, plain, memory_bytes)]
    options = _options(tree, hopeful, solver, link)
    if tree.peak_bytes(world_size) <= memory_bytes:
        nothing: Decision = {}
        result = Outcome(decision=nothing, simulated=simulate(tree, nothing, plain), bound_ps=0.0)
    else:
        deadline = None if time_limit is None else started + time_limit
        engine = Backend(name=_name_of(backend), gap=gap, deadline=deadline)
        result = PlanSearch(tree, options, plain, engine).within(memory_bytes)
    return _plan(tree, result, memory_bytes, world_size, f"{backend or 'highs'} (module program)")


def _check(
    memory_bytes: int, world_size: int, backend: str | None, time_limit: float | None, gap: float
) -> None:
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes < 0:
        raise ProblemError(f"memory_bytes must be a number of bytes, got {memory_bytes!r}")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ProblemError(f"world_size must be 1 or more ranks, got {world_size!r}")
    if not 0 <= gap < 1:
        raise ProblemError(f"gap must be at least 0 and below 1, got {gap!r}")
    check_time_limit(time_limit)
    name = _name_of(backend)
    if name is None:
        return
    reason = PulpCbc(solver=name).refuses(KnapsackProblem(weights=(), values=(), capacity=0))
    reason = reason or PulpCbc.cannot_run() if name == BACKENDS["cbc"] else reason
    if reason is not None:
        raise SolverError("pulp", f"backend '{backend}': {reason}")


def _name_of(backend: str | None) -> str | None:
    """PuLP's name of a solver."""
    return None if backend is None else BACKENDS.get(backend.lower(), backend)


def _hopeless(
    tree: ModuleTree, k: int, chosen: Sequence[int], plain: Ints, memory_bytes: int
) -> bool:
    """Whether checkpointing a module can never fit.

    That is so where all other candidates are within it or around it, so that nothing else is freed
    when it runs again, and the step exceeds the budget outside of its interval.
    """
    around = set(tree.ancestors(k))
    if any(m != k and m not in around and k not in tree.ancestors(m) for m in chosen):
        return False
    rest = plain.copy()
    for call in tree.modules[k].calls:
        rest[call.end : call.back + 1] = 0
    return int(rest.max(initial=0)) > memory_bytes


def _options(
    tree: ModuleTree, chosen: Sequence[int], solver: Solver | None, link: Link | None = None
) -> dict[int, tuple[ModuleChoice, ...]]:
    """The choices of each candidate that frees anything; equal modules share them."""
    known: dict[tuple[int, float, str], tuple[ModuleChoice, ...]] = {}
    found: dict[int, tuple[ModuleChoice, ...]] = {}
    for k in chosen:
        module = tree.modules[k]
        stats = module.operators
        most = sum(c.freeable_bytes for c in module.calls) // len(module.calls)
        key = (most, module.overhead_ms, repr(stats))
        if key not in known:
            overhead_ps = round(module.overhead_ms * PS_PER_MS)
            known[key] = choices(stats, most, solver, overhead_ps, link)
        if known[key]:
            found[k] = known[key]
    return found


def _plan(
    tree: ModuleTree, result: Outcome, memory_bytes: int, world_size: int, solver: str
) -> SACPlan:
    modules = []
    for k in sorted(result.decision, key=lambda k: tree.modules[k].calls[0].begin):
        module, choice = tree.modules[k], result.decision[k]
        stats = module.operators
        modules.append(
            ModulePlan(
                name=module.fqn,
                ops=tuple(stats.func_names),
                stored=choice.stored,
                stored_bytes=choice.kept_bytes,
                discarded_bytes=sum(stats.memory) - choice.kept_bytes,
                recompute_ms=choice.recompute_ps / PS_PER_MS,
                offloaded=choice.offloaded,
            )
        )
    spent = sum(
        choice.recompute_ps * len(tree.modules[k].calls) for k, choice in result.decision.items()
    )
    return SACPlan(
        modules=tuple(modules),
        budget_bytes=memory_bytes,
        peak_bytes=result.simulated.peak_bytes,
        plain_peak_bytes=tree.peak_bytes(world_size),
        recompute_ms=spent / PS_PER_MS,
        step_ms=tree.step_ms,
        bound_ms=max(0, min(result.bound_ps, spent)) / PS_PER_MS,
        world_size=world_size,
        solver=solver,
        mode=tree.mode,
    )
