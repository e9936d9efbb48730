"""Planning: the one way down from a joint graph and a request to a decision, and up again to a plan.

The files that the budget of ``remat plan MODEL --budget 0.3`` goes through, each entered once::

    cli/commands.py             the option, as text
    planning/request.py         every option, read and checked once
    units.py                    text to a share, bytes, or bytes of peak
    planning/planner.py         the prepared graph; a share, bytes or a peak to a capacity in bytes
    passes/decide/budgeted.py   the graph problem within the capacity, and who is asked
    solvers/run_graph.py        one solver, whose answer is not believed
    solvers/auto.py             who looks at the problem, and for how long
    solvers/lagrangian.py       what is left to decide near the hull of the frontier
    solvers/_native/module.cpp  the search

What comes back is scored where it is checked, by `remat.solvers.verify`; once it is split into two modules,
`finish` scores and verifies the plan itself, whichever way it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import torch

from remat.errors import BudgetError, PeakWarning, PlanError, ProblemError, unwarned, warn
from remat.graph import ops
from remat.graph.collection import without_collection
from remat.graph.costs import CostModel, Roofline
from remat.graph.joint import JointGraph
from remat.graph.liveness import saved_storages, simulate_peak
from remat.graph.lowering import Decision, Lowered, SavedKind
from remat.graph.storages import Sizes
from remat.graph.verify import Split, verify
from remat.passes.core.base import Pass
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import Costs, State
from remat.passes.decide.budgeted import Budgeted, RegionBudget, full_and_least, refuse_peak
from remat.passes.decide.min_cut import RuntimeOptimalCut, require_tangents
from remat.planning.order_search import Reordered
from remat.planning.peak_bound import PeakBounds
from remat.planning.peak_frontier import PeakFrontier, pareto
from remat.planning.peak_search import PeakSearch, Tried
from remat.planning.pipelines import PassManager, prepare, shaped, split, with_agreement
from remat.planning.plan import Plan
from remat.planning.request import PlanRequest
from remat.solvers.graph_problem import evaluate
from remat.solvers.hull import Hull
from remat.units import Budget, bytes_of_share, format_bytes

#: Budgets that a frontier looks at, besides the vertices of the hull.
STEPS = 24
#: Vertices of the hull that it looks at, at most.
VERTICES = 16
#: Vertices of the hull that a frontier by peak begins with, at most.
MOST_CUTS = 40
#: Nodes of all its plans together up to which those are split, for their simulated peaks.
SIMULATED = 400_000
#: Byte budgets that are tried in search of one whose peak is the wanted one.
CLOSING = 3
#: Shares of so many parts are the lower budgets at which a plan with a lower peak is looked for.
PARTS = 20
#: Why no budget lowers a peak further, and what does.
_UNSHRUNK = (
    ": weights, gradients and what one operator needs at once do not shrink with the budget. Raise the "
    "budget, or make the model or the batch smaller"
)


def plan_graph(
    joint: JointGraph,
    request: PlanRequest,
    *,
    in_place: bool = False,
    agree: Pass | None = None,
) -> Plan:
    """Plans one joint graph: by a saved plan that was made for it, by a pipeline, or by deciding.

    Args:
        joint: the captured step.
        request: how to plan it.
        in_place: work on this graph instead of on a copy.
        agree: a pass that runs on a decision before it is carried out.

    Raises:
        BudgetError: no plan is within the budget.
        PlanError: nothing to differentiate, conflicting tags, a saved plan that is not for this graph, or a
            rule of the verifier is broken.
        PassError: a pass of the pipeline failed.
        SolverError: the solver refuses, raises, or answers wrongly.
    """
    fingerprint = _fingerprint_of(joint)
    request = request.for_graph(joint, fingerprint)
    if isinstance(request.plan, Plan):
        return _apply(joint, request.plan, request, in_place=in_place)
    if request.pipeline is None:
        planner = Planner.of(joint, request, fingerprint=fingerprint, in_place=in_place)
        decided = planner.decide(request.budget)
        planner.warn_of_peak(decided, request.budget)
        return planner.finish(decided, request.budget, agree)
    pipeline = request.pipeline if agree is None else with_agreement(request.pipeline, agree)
    state = shaped(
        joint,
        in_place=in_place,
        count_outputs=request.count_outputs,
        reread_inputs=request.reread_inputs,
    )
    require_tangents(state)
    budgeted = [p for p in pipeline.flat() if isinstance(p, Budgeted)]
    return finish(
        pipeline.run(state, in_place=True).state,
        cost=budgeted[-1].cost if budgeted else Roofline(),
        budget=budgeted[-1].budget if budgeted else Budget(share=1.0),
        fingerprint=fingerprint,
    )


def _fingerprint_of(joint: JointGraph) -> str:
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph or a list of them: use "
            "remat.capture(model, args)"
        )
    return joint.fingerprint


def _apply(joint: JointGraph, plan: Plan, request: PlanRequest, *, in_place: bool) -> Plan:
    """Splits a joint graph by the saved plan that was made for it."""
    if plan.reread_inputs and not request.reread_inputs:
        raise PlanError(
            f"this plan for '{plan.graph}' may read inputs again in backward, but reread_inputs is "
            "False; plan again with remat.plan(joint, …, reread_inputs=False): the saved plan carries "
            "the option"
        )
    prepared = prepare(
        joint, in_place=in_place, hooks=request.hooks, reread_inputs=plan.reread_inputs
    )
    choice = DecisionInfo(
        capacity=plan.capacity,
        full_bytes=plan.full_bytes,
        least_bytes=plan.least_bytes,
        solver=plan.solver,
        items=plan.items,
        deterministic=plan.deterministic,
        region_budget=Budget.parse(plan.region_budget).share if plan.region_budget else None,
        least_because=plan.least_because,
    )
    return finish(
        split(replace(prepared, decision=plan.decision, choice=choice)),
        cost=request.plan_costs[plan.cost],
        budget=plan.asked,
        fingerprint=plan.fingerprint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision for one graph, what it comes to, and how it came about.

    Attributes:
        decision: what is kept.
        saved_bytes: bytes of it.
        cost: cost of what runs twice, in the unit of the cost model.
        choice: how it came about.
    """

    decision: Decision
    saved_bytes: int
    cost: int
    choice: DecisionInfo


class Planner:
    """Decides one prepared graph at any number of budgets; each capacity is decided once.

    Args:
        state: what `remat.planning.pipelines.prepare` returned; it is not changed.
        request: who decides, and by which costs.
        fingerprint: digest of its joint graph as it was captured.
        on_step: called with a line of text before each decision.
    """

    def __init__(
        self,
        state: State,
        request: PlanRequest,
        *,
        fingerprint: str,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        require_tangents(state)
        self.state, self.request, self.fingerprint = state, request, fingerprint
        self.declarations = ops.declarations()
        self._deciding = request.deciding()
        self._at: dict[int, Decided] = {}
        self._peaks: dict[Decision, int] = {}
        #: What was split last; without hooks, `finish` need not do it again.
        self._latest: tuple[Decision, State] | None = None
        self._on_step = on_step or (lambda _: None)

    @classmethod
    def of(
        cls,
        joint: JointGraph,
        request: PlanRequest,
        *,
        fingerprint: str | None = None,
        in_place: bool = False,
        on_step: Callable[[str], None] | None = None,
    ) -> Planner:
        """Prepares a joint graph."""
        fingerprint = fingerprint or _fingerprint_of(joint)
        state = prepare(
            joint,
            in_place=in_place,
            count_outputs=request.count_outputs,
            hooks=request.hooks,
            reread_inputs=request.reread_inputs,
        )
        return cls(state, request, fingerprint=fingerprint, on_step=on_step)

    @cached_property
    def lowered(self) -> Lowered:
        """The graph problem."""
        return self.state.lowered(self.request.cost)

    @cached_property
    def hull(self) -> Hull:
        """The lower hull of its frontier."""
        return Hull.of(self.lowered.problem)

    @cached_property
    def _limits(self) -> tuple[int, int]:
        return full_and_least(self.state)

    @property
    def full_bytes(self) -> int:
        """Bytes that the runtime-optimal partition saves."""
        return self._limits[0]

    @property
    def least_bytes(self) -> int:
        """The least bytes that any plan saves."""
        return self._limits[1]

    def decide(self, budget: Budget) -> Decided:
        """The decision under a budget, and under what the code sets for its region.

        Where one is found that peaks no higher than budget 1's, it is of those.

        Raises:
            BudgetError: none is within it.
            SolverError: the solver refuses, raises, or answers wrongly.
        """
        if budget.on_peak:
            refuse_peak(budget, self.state.get(RegionBudget()))
            return self._within_peak(budget)
        found = self._decided(replace(self._deciding, budget=budget).limits(self.state))
        return self._lowered_peak(found) if self.peaks_above_full(found) else found

    @property
    def _full(self) -> Decided:
        """The decision under budget 1."""
        return self.at(self.full_bytes)

    def peaks_above_full(self, decided: Decided) -> bool:
        """Whether a decision that is allowed less than budget 1's peaks higher than that."""
        if (decided.choice.capacity or 0) >= self.full_bytes:
            return False
        peak = self.peak(decided)
        # What budget 1's saves is alive between its halves, unless hooks pack it.
        low = 0 if self.request.hooks else self._full.saved_bytes + self._resident
        return peak > low and peak > self.peak(self._full)

    def warn_of_peak(self, decided: Decided, budget: Budget) -> None:
        """Warns of a plan that saves less than budget 1's and peaks higher."""
        if budget.on_peak or not self.peaks_above_full(decided):
            return
        peak, most = self.peak(decided), self.peak(self._full)
        share = (decided.choice.capacity or 0) / self.full_bytes
        warn(
            f"budget {budget.label} for '{self.state.joint.name}' has a peak of {format_bytes(peak)} ({peak} "
            f"bytes), above the {format_bytes(most)} ({most} bytes) of budget 1: it bounds what is saved, and "
            "no plan found within it makes less at once. To bound the peak, give "
            f"remat.Peak({share:.2f}), as text peak:{share:.2f}: 0 is the least peak found, 1 that of budget 1",
            PeakWarning,
            stacklevel=4,
        )

    @cached_property
    def _resident(self) -> int:
        """Bytes that are alive at every moment: what the step is given."""
        roles, nodes = self.state.roles.placeholders, self.state.index.nodes
        given = (nodes[i] for i, role in roles.items() if not role.in_backward)
        return sum(Sizes(self.state.joint.memories).of_all(given).values())

    def _lowered_peak(self, decided: Decided) -> Decided:
        """The cheapest decision found within the bytes of another that peaks no higher than budget 1's.

        The other, where none is. It is looked for at fixed budgets, shares of so many `PARTS`, from the
        highest within those bytes down to where none can be cheaper: so costs do not rise with the budget.
        Under a time limit, which promises nothing twice, it is looked for within those bytes alone.
        """
        choice, full, least = decided.choice, self.full_bytes, self.least_bytes
        capacity = choice.capacity or 0
        best: Decided | None = None
        rungs = {
            least,
            *(k * full // PARTS for k in range(1, (capacity * PARTS + PARTS - 1) // full + 1)),
        }
        if self.request.time_limit:
            best, rungs = self._as_low_as_full(decided), set()
        for rung in sorted(rungs, reverse=True):
            if rung < least or (best and self.hull.edge(rung).bound(rung) >= best.cost):
                break
            lower = self._as_low_as_full(self.at(rung))
            if lower is None and best is None:
                break
            if lower and (best is None or lower.cost < best.cost):
                best = lower
        if best is None:
            return decided
        ran = (choice, best.choice)
        elapsed_s, repeats = sum(c.elapsed_s for c in ran), all(c.deterministic for c in ran)
        return replace(best, choice=replace(choice, elapsed_s=elapsed_s, deterministic=repeats))

    def _as_low_as_full(self, decided: Decided) -> Decided | None:
        """A decision if it peaks no higher than budget 1's, else the cheapest found in its bytes that does not."""
        if not self.peaks_above_full(decided):
            return decided
        capacity, saved_of = decided.choice.capacity or 0, self.lowered.saved_of
        # A search of its own: what it finds depends on nothing that was looked at before.
        search = PeakSearch(self.state, self.lowered, self.request.cost)
        starts = [saved_of(d.decision) for d in (decided, self._full)]
        tried = search.within(search.tried(starts[1]).peak_bytes, starts, capacity)
        found = self._decided_by_peak(tried)
        fits = found.saved_bytes <= capacity and self.peak(found) <= self.peak(self._full)
        return found if fits else None

    def at(self, capacity: int) -> Decided:
        """The decision within a number of bytes, whatever the code sets for its region."""
        if capacity not in self._at:
            self._on_step(f"deciding at {format_bytes(capacity)}")
            self._at[capacity] = self._decided(self._choice(capacity))
        return self._at[capacity]

    def _choice(self, capacity: int) -> DecisionInfo:
        return DecisionInfo(
            capacity=capacity, full_bytes=self.full_bytes, least_bytes=self.least_bytes
        )

    def _decided(self, limits: DecisionInfo) -> Decided:
        found, choice = self._deciding.decide(self.state, limits)
        return Decided(
            decision=self.lowered.decision(found.saved),
            saved_bytes=found.saved_bytes,
            cost=found.cost,
            choice=choice,
        )

    @property
    def _runtime_optimal(self) -> Decided:
        """What the cut without a budget decides."""
        scored = evaluate(self.lowered.problem, self.state.get(RuntimeOptimalCut()))
        return Decided(
            decision=self.lowered.decision(scored.saved),
            saved_bytes=scored.saved_bytes,
            cost=scored.recompute_cost,
            choice=self._choice(self.full_bytes),
        )

    def peak(self, decided: Decided) -> int:
        """The simulated peak of a decision, in bytes."""
        key = decided.decision
        if key not in self._peaks:
            self._on_step(f"simulating {format_bytes(decided.saved_bytes)}")
            with unwarned():  # it may be no plan
                done = self._split(decided)
            self._latest = (key, done)
            assert done.forward is not None
            assert done.backward is not None
            outputs = done.joint.num_fwd_outputs
            self._peaks[key] = simulate_peak(
                done.forward, done.backward, outputs, done.joint.memories
            ).nbytes
        return self._peaks[key]

    def _split(self, decided: Decided) -> State:
        return split(replace(self.state, decision=decided.decision, choice=decided.choice))

    def capacities(self) -> Iterator[int]:
        """The budgets that a frontier looks at: steps between the ends, and vertices of the hull."""
        vertices = [v.saved_bytes for v in self.hull.vertices]
        least, most = vertices[0], max(vertices[-1], self.full_bytes)
        yield from (least + (most - least) * i // STEPS for i in range(STEPS + 1))
        every = max(1, -(-len(vertices) // VERTICES))
        yield from vertices[::every]

    def pareto(self) -> tuple[Decided, ...]:
        """The decisions at all those budgets that no other beats, fewest bytes first."""
        found = [self.at(c) for c in sorted(set(self.capacities()))]
        return tuple(pareto(found, lambda d: (d.saved_bytes, d.cost)))

    def by_peak(self) -> tuple[list[tuple[Decided, int]], tuple[tuple[int, int], ...]]:
        """Decisions that no other beats, each with its peak, the lowest first; and a line below which none lies.

        Peaks are simulated; of many decisions on a large graph they are those of their schedules, which may
        differ by what a few scalars take. The line is given by its vertices (peak bytes, cost).
        """
        search = PeakFrontier(self.state, self.lowered, self.request.cost)
        vertices, lift = self.hull.vertices, self.hull.reduction.lift
        every = -(-len(vertices) // MOST_CUTS)
        cuts = [lift(v.saved) for v in (*vertices[::every], vertices[-1])]
        others = [self.lowered.saved_of(d.decision) for d in (self._full, self._runtime_optimal)]
        found = search.found([*cuts, *others], self._on_step)
        self._on_step("proving bounds")
        line = search.bound(self._peak_bounds, cuts)
        few = len(found) * len(self.state.index) <= SIMULATED
        pairs = []
        for f in found:
            d = self._decided_by_peak(f)
            at = self.peak(d) if few else f.peak_bytes
            bound = next((cost for peak, cost in line if peak >= at), 0)
            pairs.append((replace(d, choice=replace(d.choice, recompute_bound=bound)), at))
        return pareto(pairs, lambda pair: (pair[1], pair[0].cost)), line

    @cached_property
    def _peak_search(self) -> PeakSearch:
        return PeakSearch(self.state, self.lowered, self.request.cost)

    @cached_property
    def _cheapest(self) -> Decided:
        return self.at(max(self.hull.ends[1].saved_bytes, self.full_bytes))

    def _within_peak(self, budget: Budget) -> Decided:
        """The cheapest decision found whose simulated peak is within a budget on it.

        Raises:
            BudgetError: none is; the message names the least peak that was found, or is possible.
        """
        peak_bytes = budget.peak_bytes
        if peak_bytes is None:
            least, most = self._least_found, self.peak(self._full)
            peak_bytes = least + bytes_of_share(budget.peak_share or 0.0, most - least)
        if self.peak(self._cheapest) <= peak_bytes:
            return self._cheapest
        asked = f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes)"
        possible = 0 if self.request.hooks else self._peak_search.least_possible
        if peak_bytes < possible:
            raise BudgetError(
                f"{asked}, which is infeasible: every schedule of this step has {possible} bytes "
                f"({format_bytes(possible)}) alive at some moment{_UNSHRUNK}; remat.Peak(0.0) asks for the "
                "least peak that is found"
            )
        self._on_step(f"searching within a peak of {format_bytes(peak_bytes)}")
        found = self._searched(peak_bytes)
        others = (self._full, *((self._least_peak,) if budget.peak_bytes is None else ()))
        known: list[Decided] = [d for d in (found, *others) if d and self.peak(d) <= peak_bytes]
        if known and not self.request.hooks:
            return min(known, key=lambda d: (d.cost, self.peak(d), d.saved_bytes))
        # What the search takes the peak to be is not what it is where hooks pack what is saved.
        swept = self._swept(peak_bytes, self.peak)
        fits = [d for d in (*known, self._least_peak, swept) if d and self.peak(d) <= peak_bytes]
        if not fits:
            least = self._least_found
            proven = f", and it is proven only that none has less than {possible} bytes"
            raise BudgetError(
                f"{asked}, and no plan was found within it: the least peak of any plan found is "
                f"{format_bytes(least)} ({least} bytes){proven if possible else ''}{_UNSHRUNK}"
            )
        best = min(fits, key=lambda d: (d.cost, d.saved_bytes))
        better = self._searched(peak_bytes, best)
        return better if better is not None and better.cost < best.cost else best

    @cached_property
    def _least_found(self) -> int:
        """The least peak of all decisions that are looked at whatever the budget, in bytes."""
        return min(map(self.peak, (self._least_peak, self._cheapest, self._full)))

    @cached_property
    def _least_peak(self) -> Decided:
        """The decision of the least peak that a search for less than is possible comes to."""
        search, vertices, lift = self._peak_search, self.hull.vertices, self.hull.reduction.lift
        some = vertices[:: max(1, len(vertices) // (4 * VERTICES))]
        peaks = [search.tried(lift(v.saved)).peak_bytes for v in some]
        lowest = peaks.index(min(peaks))
        beside = {some[max(0, lowest - 1)], some[lowest], some[min(len(some), lowest + 2) - 1]}
        between = {(a.saved_bytes + b.saved_bytes) // 2 for a, b in combinations(beside, 2)}
        starts = [lift(v.saved) for v in some]
        starts += [self.lowered.saved_of(self.at(c).decision) for c in sorted(between)]
        found = search.within(0, [*starts, *self._starts(0)])
        decided = [self._decided_by_peak(found)]
        if self.request.hooks:
            decided += map(self.at, self.capacities())
        else:
            sequence, _, boundary = search.schedule(found.saved)
            lower = search.orders.lowest(sequence, boundary)
            decided += [self._decided_by_peak(lower)] if lower else []
        return min(decided, key=self.peak)

    def _searched(self, peak_bytes: int, *starts: Decided) -> Decided | None:
        """What prices on moments come to; None where that does not fit."""
        more = [self.lowered.saved_of(d.decision) for d in starts]
        found = self._peak_search.within(peak_bytes, [*more, *self._starts(peak_bytes)])
        decided = self._decided_by_peak(found)
        if not self.request.hooks:
            sequence, _, boundary = self._peak_search.schedule(found.saved)
            other = self._peak_search.orders.within(sequence, boundary, peak_bytes)
            fits = self.peak(decided) <= peak_bytes
            if other and (other.cost < decided.cost or not fits):
                ordered = self._decided_by_peak(other)
                decided = ordered if self.peak(ordered) <= peak_bytes else decided
        if self.peak(decided) > peak_bytes:
            return None
        bound = self._peak_bounds.bound(peak_bytes, self._peak_search.highest(found))
        return replace(decided, choice=replace(decided.choice, recompute_bound=bound))

    @cached_property
    def _peak_bounds(self) -> PeakBounds:
        return PeakBounds(self.state, self.lowered.problem)

    def _starts(self, peak_bytes: int) -> list[tuple[int, ...]]:
        """Decisions that a search for a peak begins with."""
        found = (self._cheapest, self._full, self._runtime_optimal, *self._closing_in(peak_bytes))
        lift, every = self.hull.reduction.lift, max(1, len(self.hull.vertices) // VERTICES)
        return [
            *(self.lowered.saved_of(d.decision) for d in found),
            *(lift(v.saved) for v in self.hull.vertices[::every]),
        ]

    def _closing_in(self, peak_bytes: int) -> Iterator[Decided]:
        """Decisions at byte budgets closer and closer to the largest whose peak is within one.

        Between the vertices of the hull around it, by the rule of false position, bisecting every other
        time.
        """
        search, lift = self._peak_search, self.hull.reduction.lift
        every = max(1, len(self.hull.vertices) // VERTICES)
        ends = [
            (v.saved_bytes, search.tried(lift(v.saved)).peak_bytes)
            for v in (*self.hull.vertices[::every], self.hull.vertices[-1])
        ]
        inside = [i for i, (_, peak) in enumerate(ends) if peak <= peak_bytes]
        if not inside or inside[-1] + 1 == len(ends):
            return
        low, high = ends[inside[-1]], ends[inside[-1] + 1]
        for turn in range(CLOSING):
            if high[0] - low[0] <= max(1, low[0] // 500):
                return
            share = (peak_bytes - low[1]) / max(1, high[1] - low[1]) if turn % 2 == 0 else 0.5
            capacity = low[0] + int(min(max(share, 0.05), 0.95) * (high[0] - low[0]))
            found = self.at(capacity)
            yield found
            peak = self._scheduled_peak(found)
            low, high = ((capacity, peak), high) if peak <= peak_bytes else (low, (capacity, peak))

    def _decided_by_peak(self, found: Tried | Reordered) -> Decided:
        """What a search for a peak has found, as a decision."""
        lowered = self.lowered
        if isinstance(found, Tried):
            decision = lowered.decision(found.saved)
            saved_bytes = evaluate(lowered.problem, found.saved).saved_bytes
        else:
            decision = found.decision
            saved_bytes = sum(lowered.problem.size[i] for i in lowered.saved_of(decision))
        asked = [d.choice for d in self._at.values()]  # the search began with what they came to
        choice = replace(
            self._choice(max(self.full_bytes, saved_bytes)),
            solver=self._deciding.asked().name,
            items=len(lowered.problem),
            elapsed_s=sum(c.elapsed_s for c in asked),
            deterministic=all(c.deterministic for c in asked),
        )
        return Decided(decision=decision, saved_bytes=saved_bytes, cost=found.cost, choice=choice)

    def _scheduled_peak(self, decided: Decided) -> int:
        """The peak of a decision by its schedule: as `peak`, but for hooks, and much faster."""
        return self._peak_search.tried(self.lowered.saved_of(decided.decision)).peak_bytes

    def _swept(self, peak_bytes: int, peak: Callable[[Decided], int]) -> Decided | None:
        """The cheapest decision of a sweep over byte budgets that is within a peak; None if none is."""
        capacities = sorted(set(self.capacities()))
        fits = [d for d in (self._runtime_optimal,) if peak(d) <= peak_bytes]
        for c in reversed(capacities):  # costs rise: what follows cannot beat what costs less
            if fits and self.hull.edge(c).bound(c) >= min(d.cost for d in fits):
                break
            found = self.at(c)
            if peak(found) <= peak_bytes:
                fits.append(found)
        if not fits:
            return None
        best = min(fits, key=lambda d: (d.cost, d.saved_bytes))
        # Between the best that fits and the next budget that was tried there may be better.
        low = best.saved_bytes
        high = min((c for c in capacities if c > low), default=low)
        for _ in range(6):
            if high - low <= low // 1000:
                break
            middle = (low + high) // 2
            found = self.at(middle)
            if peak(found) <= peak_bytes:
                best = min(best, found, key=lambda d: (d.cost, d.saved_bytes))
                low = middle
            else:
                high = middle
        return best

    def finish(self, decided: Decided, budget: Budget, agree: Pass | None = None) -> Plan:
        """The plan of a decision, or of what ``agree`` makes of it."""
        latest, self._latest = self._latest, None
        if agree is not None:
            state = replace(self.state, decision=decided.decision, choice=decided.choice)
            done = split(PassManager((agree,)).run(state, in_place=True, verify=False).state)
        elif latest is not None and latest[0] == decided.decision and self.request.hooks is None:
            done = replace(latest[1], choice=decided.choice)
        else:
            done = self._split(decided)
        return finish(done, cost=self.request.cost, budget=budget, fingerprint=self.fingerprint)


@without_collection
def finish(state: State, *, cost: CostModel, budget: Budget, fingerprint: str) -> Plan:
    """Scores and verifies a partitioned state: the end of every way to a plan.

    Raises:
        PlanError: a rule of the verifier is broken.
    """
    assert state.decision is not None
    assert state.forward is not None
    assert state.backward is not None
    lowered = state.lowered(cost)
    problem = lowered.problem
    scored = evaluate(problem, lowered.saved_of(state.decision))
    n = state.joint.num_fwd_outputs
    saved_bytes = sum(
        saved_storages(
            state.forward, n, count_outputs=state.count_outputs, memories=state.joint.memories
        ).values()
    )
    choice = state.choice or DecisionInfo()
    capacity = saved_bytes if choice.capacity is None else choice.capacity
    verify(
        Split(
            joint=state.joint,
            forward=state.forward,
            backward=state.backward,
            capacity=capacity,
            count_outputs=state.count_outputs,
            saved_bytes=saved_bytes,
            refilled=frozenset() if state.reread_inputs else state.refillable,
        )
    )
    state.forward.recompile()
    state.backward.recompile()
    kept = [i for i in scored.saved if lowered.kind[i] is SavedKind.VALUE]
    saved = tuple(problem.names[i] for i in kept)
    recomputed = tuple(problem.names[i] for i in scored.recomputed if problem.in_forward[i])
    recompute_cost = scored.recompute_cost
    if state.decision.is_ordered:
        saved = state.decision.saved
        recomputed = state.decision.further_runs
        costs = state.get(Costs(cost))
        recompute_cost = sum(costs[state.index.by_name[name]] for name in recomputed)
    region = choice.region_budget
    priced = [state.index.nodes[i] for i in dict.fromkeys(lowered.position)]
    return Plan(
        saved=saved,
        snapshots=state.decision.snapshots,
        recomputed=recomputed,
        saved_bytes=saved_bytes,
        peak_bytes=simulate_peak(state.forward, state.backward, n, state.joint.memories).nbytes,
        recompute_cost=recompute_cost,
        recompute_bound=min(
            recompute_cost,
            max(choice.recompute_bound, Hull.of(problem).edge(capacity).bound(capacity)),
        ),
        unit=problem.unit,
        capacity=capacity,
        full_bytes=choice.full_bytes if choice.full_bytes is not None else saved_bytes,
        least_bytes=choice.least_bytes if choice.least_bytes is not None else 0,
        budget=str(budget),
        solver=choice.solver,
        cost=str(cost),
        items=choice.items,
        deterministic=choice.deterministic,
        solve_s=choice.elapsed_s,
        graph=state.joint.name,
        fingerprint=fingerprint,
        fallbacks=tuple(cost.fallbacks(priced)),
        reread_inputs=state.reread_inputs,
        reread=tuple(name for name in saved if state.reread_inputs and name in state.refillable),
        lower=state.joint.lower,
        torch=torch.__version__,
        region_budget="" if region is None else str(Budget(share=region)),
        least_because=choice.least_because,
        operators=state.operators,
        forward_order=state.decision.forward_order,
        backward_order=state.decision.backward_order,
        _asked=budget,
        _modules=(state.forward, state.backward),
        _problem=problem,
    )
