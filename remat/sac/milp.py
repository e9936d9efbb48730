"""Which modules to checkpoint and what each of them stores: a mixed-integer program over the whole model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat.errors import BudgetError, ProblemError, SolverError
from remat.graph.budget import format_bytes
from remat.sac.choices import Choices, candidates, choices
from remat.sac.cuts import Cut, Cutter
from remat.sac.expanded import Expanded, seen
from remat.sac.modules import Bytes, ModuleTree
from remat.sac.peaks import Simulated, moments_of_interest, simulate
from remat.sac.placing import Decision, ModuleClass, classes, place
from remat.sac.plan import ModulePlan, SACPlan
from remat.sac.stats import PS_PER_MS
from remat.solvers.base import Solver
from remat.solvers.problem import KnapsackProblem
from remat.solvers.pulp_cbc import PulpCbc, load_pulp, pulp_engine
from remat.solvers.run import check_time_limit

#: PuLP's names of solvers that have another one here.
BACKENDS = {"cbc": "COIN_CMD", "highs": "HiGHS_CMD", "scip": "SCIP_CMD", "gurobi": "GUROBI_CMD"}
#: Branch-and-bound nodes for one program, where no time limit is given.
NODES = 50_000
#: The same where each module is a part of the program by itself.
SMALL_NODES = 1_000
#: Programs solved for one plan, at most, and how many cuts each failure adds.
ROUNDS, CUTS = 60, 8
#: How often the budget is lowered where what is held longer in forward is too much.
LOWERED = 6
#: Gap at which programs stop as long as their answers only show what is missing.
_LOOSE = 0.01
#: Programs count microseconds, doubles being what they are.
_UNIT = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """How often each choice of each class is taken, and picoseconds that nothing gets below."""

    counts: tuple[tuple[int, ...], ...]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A decision that fits, and the least picoseconds that any needs."""

    decision: Decision
    simulated: Simulated
    bound_ps: float


def plan_modules(
    tree: ModuleTree,
    memory_bytes: int,
    *,
    world_size: int = 1,
    units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] = (),
    backend: str = "cbc",
    solver: Solver | None = None,
    time_limit: float | None = None,
    gap: float = 0.0,
) -> SACPlan:
    """Chooses the modules to checkpoint, and the operators that each stores.

    The peak of the step stays within the budget at the least recompute time. No module within a
    checkpointed one is checkpointed, no leaf is, and nothing that contains an FSDP unit. Each module
    offers all its Pareto-optimal sets of operators to store, so that what is chosen is a set and no
    fraction of memory; equal modules are counted instead of told apart (`remat.sac.cuts`), and what
    comes out is simulated moment by moment (`remat.sac.peaks`).

    Args:
        tree: the modules.
        memory_bytes: bytes that the step may take, parameters and gradients included.
        world_size: ranks that parameters and gradients are spread over, by FSDP. What FSDP gathers
            for a moment is not counted.
        units: names or patterns of the modules that may be checkpointed; None: all.
        fsdp_units: names or patterns of the modules that FSDP gathers as one.
        backend: ``"cbc"``, or PuLP's name of another solver.
        solver: who decides within a module, at some budgets; None: every best choice is known.
        time_limit: seconds; without it, work is counted.
        gap: relative gap at which the program may stop; 0: never before the best.

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
    options = _options(tree, hopeful, solver)
    found = classes(tree, options)
    search = _Search(tree, found, plain, backend, time_limit, gap, started)
    if tree.peak_bytes(world_size) <= memory_bytes:
        nothing: Decision = {}
        result = _Found(decision=nothing, simulated=simulate(tree, nothing, plain), bound_ps=0.0)
    else:
        result = search.within(memory_bytes)
    return _plan(tree, result, memory_bytes, world_size, f"{backend} (module program)")


def _check(
    memory_bytes: int, world_size: int, backend: str, time_limit: float | None, gap: float
) -> None:
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes < 0:
        raise ProblemError(f"memory_bytes must be a number of bytes, got {memory_bytes!r}")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ProblemError(f"world_size must be 1 or more ranks, got {world_size!r}")
    if not 0 <= gap < 1:
        raise ProblemError(f"gap must be at least 0 and below 1, got {gap!r}")
    check_time_limit(time_limit)
    name = BACKENDS.get(backend.lower(), backend)
    reason = PulpCbc(solver=name).refuses(KnapsackProblem(weights=(), values=(), capacity=0))
    reason = reason or PulpCbc.cannot_run() if name == BACKENDS["cbc"] else reason
    if reason is not None:
        raise SolverError("pulp", f"backend '{backend}': {reason}")


def _hopeless(
    tree: ModuleTree, k: int, chosen: Sequence[int], plain: Bytes, memory_bytes: int
) -> bool:
    """Whether all else that may be checkpointed is within a module or around it, and that too much.

    Such a module has everything back at once, and nothing else is freed meanwhile.
    """
    around = set(tree.ancestors(k))
    if any(m != k and m not in around and k not in tree.ancestors(m) for m in chosen):
        return False
    rest = plain.copy()
    for call in tree.modules[k].calls:
        rest[call.end : call.back + 1] = 0
    return int(rest.max(initial=0)) > memory_bytes


def _options(tree: ModuleTree, chosen: Sequence[int], solver: Solver | None) -> dict[int, Choices]:
    """The choices of each candidate that frees anything; equal modules share them."""
    known: dict[Any, Choices] = {}
    found: dict[int, Choices] = {}
    for k in chosen:
        module = tree.modules[k]
        stats = module.stats
        assert stats is not None
        most = sum(c.activation_bytes - c.input_bytes for c in module.calls) // len(module.calls)
        key = (
            most,
            tuple(stats.func_names),
            tuple(stats.memory),
            tuple(stats.runtimes),
            tuple(stats.view_like_ops),
            tuple(stats.rand_ops),
            tuple(stats.inplace_ops),
            stats.force_store_random,
        )
        if key not in known:
            known[key] = choices(stats, most, solver)
        if known[key].all:
            found[k] = known[key]
    return found


class _Search:
    """Programs, solved one after the other, until what the last one says fits."""

    def __init__(
        self,
        tree: ModuleTree,
        found: Sequence[ModuleClass],
        plain: Any,
        backend: str,
        time_limit: float | None,
        gap: float,
        started: float,
    ) -> None:
        self._tree, self._found, self._plain = tree, found, plain
        self._backend = BACKENDS.get(backend.lower(), backend)
        self._deadline = None if time_limit is None else started + time_limit
        self._gap = gap
        self._cutter = Cutter(tree, found, plain)
        members = {k: c for c, one in enumerate(found) for k in one.members}
        self._class_of = members
        self._moments = moments_of_interest(tree, members, plain)

    def within(self, budget: int) -> _Found:
        """The best decision within a budget."""
        cuts = [self._cutter.at(t, budget) for t in self._tops()]
        gap, bound = max(self._gap, _LOOSE), 0.0
        for _ in range(ROUNDS):
            answer = self._solve(cuts, gap)
            if answer is None:
                break
            bound = max(bound, answer.bound)
            decision = place(self._found, answer.counts)
            simulated = simulate(self._tree, decision, self._plain)
            if simulated.peak_bytes <= budget and gap == self._gap:
                return _Found(
                    decision=decision, simulated=simulated, bound_ps=self._floor(cuts, bound)
                )
            fresh = self._fails(decision, simulated, budget, answer.counts)
            if not fresh and gap == self._gap:
                found = self._by_module(budget)
                if found is None:
                    break
                return _Found(
                    decision=found[0], simulated=found[1], bound_ps=self._floor(cuts, bound)
                )
            cuts += fresh
            gap = gap if fresh else self._gap
        raise self._short(budget)

    def _floor(self, cuts: Sequence[Cut], bound: float) -> float:
        """The bound for all choices, those included that were left out because they are many."""
        if all(c.floors == tuple(o.recompute_ps for o in c.choices) for c in self._found):
            return bound
        answer = self._solve(cuts, self._gap, floors=True)
        return bound if answer is None else min(bound, answer.bound)

    def _by_module(self, budget: int | None) -> tuple[Decision, Simulated] | None:
        """The program with every module by itself; without a budget, for the lowest peak."""
        options = (
            seen(self._found)
            if budget is not None
            else {k: c.choices[-1:] for c in self._found for k in c.members}
        )
        lowered = budget
        for _ in range(LOWERED):
            program = Expanded(self._tree, options, self._plain, lowered)
            status = self._run(program.model, self._gap, SMALL_NODES)
            if status != load_pulp().LpStatusOptimal:
                return None
            decision = program.decision()
            simulated = simulate(self._tree, decision, self._plain)
            if budget is None or lowered is None or simulated.peak_bytes <= budget:
                return decision, simulated
            lowered -= max(simulated.peak_bytes - budget, 1)
        return None

    def _tops(self) -> list[int]:
        """The moments with most memory: after forward, and in backward."""
        back = [t for t in self._moments if t >= self._tree.forward_end]
        return sorted(back or self._moments, key=lambda t: -int(self._plain[t]))[:1]

    def _fails(
        self,
        decision: Decision,
        simulated: Simulated,
        budget: int,
        counts: Sequence[Sequence[int]],
    ) -> list[Cut]:
        """Cuts that say why a decision does not fit, the worst moments first."""
        over = [t for t in self._moments if simulated.memory[t] > budget]
        over.sort(key=lambda t: -int(simulated.memory[t]))
        made = [self._cutter.at(t, budget, decision) for t in over[:CUTS]]
        for (k, _), peak in simulated.reruns.items():
            if peak > budget:
                cut = self._cutter.rerun(self._class_of[k], budget, decision)
                made += [] if cut is None else [cut]
        return [cut for cut in made if cut.missing(counts) > 0]

    def _short(self, budget: int) -> BudgetError:
        """Says what the least is that a plan can do with."""
        found = self._by_module(None)
        least = int(self._plain.max(initial=0)) if found is None else found[1].peak_bytes
        return BudgetError(
            f"no plan fits into {format_bytes(budget)} ({budget} bytes): the least that checkpointing "
            f"gets the step to is {least} bytes ({format_bytes(least)}), so the budget is short by "
            f"{least - budget} bytes. Raise it, make the batch smaller, or spread parameters over "
            "more ranks"
        )

    def _solve(self, cuts: Sequence[Cut], gap: float, *, floors: bool = False) -> _Answer | None:
        """Solves one program; None if nothing fits.

        Args:
            cuts: what the memory demands.
            gap: at which it may stop.
            floors: count for each choice what all that it stands for take at least.
        """
        pulp = load_pulp()
        model = pulp.LpProblem("modules", pulp.LpMinimize)
        new = getattr(model, "add_variable", pulp.LpVariable)  # since and before PuLP 3.3
        counts = [
            [new(f"n{c}_{j}", 0, len(one.members), pulp.LpInteger) for j in range(len(one.choices))]
            for c, one in enumerate(self._found)
        ]
        scale = max(1.0, float(self._plain.max(initial=1)) / 2**20)
        terms = []
        for one, taken in zip(self._found, counts, strict=True):
            times = one.floors if floors else [x.recompute_ps for x in one.choices]
            calls = len(one.gains[0])
            terms += [(n, calls * ps / _UNIT) for n, ps in zip(taken, times, strict=True)]
        model += pulp.LpAffineExpression(terms)
        for cut in cuts:
            row = [(counts[c][j], gain / scale) for (c, j), gain in cut.gains.items()]
            model += pulp.LpAffineExpression(row) >= cut.need / scale
        for c, one in enumerate(self._found):
            nested = []
            a = c
            while a >= 0:
                nested += [(n, len(one.members) / len(self._found[a].members)) for n in counts[a]]
                a = self._found[a].parent
            model += pulp.LpAffineExpression(nested) <= len(one.members)
        status = self._run(model, gap, NODES)
        if status == pulp.LpStatusInfeasible:
            return None
        if status != pulp.LpStatusOptimal:
            raise SolverError("pulp", f"{self._backend} ended with '{pulp.LpStatus[status]}'")
        exact = model.sol_status == pulp.LpSolutionOptimal and not gap
        rounded = tuple(tuple(round(n.varValue or 0.0) for n in row) for row in counts)
        if not exact:  # PuLP hands no bound on: that of the relaxation is one
            for n in model.variables():
                n.cat = pulp.LpContinuous
            self._run(model, 0.0, NODES)
        return _Answer(counts=rounded, bound=float(pulp.value(model.objective)) * _UNIT)

    def _run(self, model: Any, gap: float, nodes: int) -> int:
        limits: dict[str, Any] = {"maxNodes": nodes}
        if self._deadline is not None:
            limits = {"timeLimit": max(0.1, self._deadline - time.monotonic())}
        with tempfile.TemporaryDirectory() as folder:
            engine = pulp_engine(self._backend, gapRel=gap, threads=1, **limits)
            engine.tmpDir = folder
            return int(model.solve(engine))


def _plan(
    tree: ModuleTree, result: _Found, memory_bytes: int, world_size: int, solver: str
) -> SACPlan:
    modules = []
    for k in sorted(result.decision, key=lambda k: tree.modules[k].calls[0].begin):
        module, choice = tree.modules[k], result.decision[k]
        stats = module.stats
        assert stats is not None
        modules.append(
            ModulePlan(
                name=module.fqn,
                ops=tuple(stats.func_names),
                stored=choice.stored,
                stored_bytes=choice.kept_bytes,
                discarded_bytes=sum(stats.memory) - choice.kept_bytes,
                recompute_ms=choice.recompute_ps / PS_PER_MS,
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
        bound_ms=min(result.bound_ps, spent) / PS_PER_MS,
        world_size=world_size,
        solver=solver,
        mode=tree.mode,
    )
