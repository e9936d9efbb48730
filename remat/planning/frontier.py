"""The frontier of one joint graph: the best plans over all budgets, and the search for a peak."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from remat.errors import BudgetError, PlanError, ProblemError
from remat.graph import ops
from remat.graph.costs import CostModel
from remat.graph.liveness import simulate_peak
from remat.graph.lowering import Decision, Lowered
from remat.passes.core.base import Pass
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import State
from remat.passes.decide.budgeted import RegionBudget, least_decision, refuse_peak
from remat.passes.decide.min_cut import RuntimeOptimalCut, require_tangents
from remat.planning.pipelines import PassManager, decide, deciding_pass, split
from remat.planning.plan import Plan, finish
from remat.solvers.base import Solver
from remat.solvers.graph_problem import evaluate
from remat.solvers.hull import Hull
from remat.units import Budget, format_bytes

#: Budgets that a frontier looks at, besides the vertices of the hull.
STEPS = 24
#: Vertices of the hull that it looks at, at most.
VERTICES = 16
#: Version of the JSON form.
JSON_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan of a frontier, by its figures.

    Attributes:
        saved_bytes: bytes that forward hands to backward, beyond inputs and outputs.
        recompute_cost: cost of what runs twice, in the frontier's unit.
        peak_bytes: simulated peak of the step.
    """

    saved_bytes: int
    recompute_cost: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """The best plans over all budgets: less cost only for more bytes.

    Attributes:
        graph: name of the joint graph.
        solver: who decided.
        cost: the cost model.
        unit: unit of all costs.
        points: fewest saved bytes first; cost falls from each to the next.
        bound: vertices (bytes, cost) of a line below which no plan lies, fewest bytes first.
        full_bytes: bytes that the runtime-optimal partition saves.
        least_bytes: the least bytes that any plan saves.
    """

    graph: str
    solver: str
    cost: str
    unit: str
    points: tuple[FrontierPoint, ...]
    bound: tuple[tuple[int, int], ...]
    full_bytes: int
    least_bytes: int
    _sweep: Sweep = field(repr=False)
    _decided: tuple[Decided, ...] = field(repr=False)

    def knee(self, *, by: str = "origin") -> FrontierPoint:
        """The point where more memory starts to buy little.

        Bytes and cost are scaled to [0, 1] over the frontier.

        Args:
            by: ``"origin"``: nearest to no bytes and no cost; ``"chord"``: farthest below the line
                from the first to the last point.
        """
        if by not in ("origin", "chord"):
            raise ProblemError(f"by is {by!r}; expected 'origin' or 'chord'")
        first, last = self.points[0], self.points[-1]
        wide = last.saved_bytes - first.saved_bytes
        high = first.recompute_cost - last.recompute_cost
        if wide == 0 or high == 0:
            return last

        def distance(p: FrontierPoint) -> float:
            x = (p.saved_bytes - first.saved_bytes) / wide
            y = (p.recompute_cost - last.recompute_cost) / high
            return x * x + y * y if by == "origin" else x + y

        return min(self.points, key=distance)

    def plan(self, point: FrontierPoint) -> Plan:
        """The plan of a point.

        Raises:
            ProblemError: the point is not of this frontier.
            PlanError: other operators are declared pure than when the frontier was made.
        """
        if ops.declarations() != self._sweep.declarations:
            raise PlanError(
                f"what is declared pure has changed since this frontier of '{self.graph}' was made, and "
                "with it what may run again: make the frontier anew"
            )
        if point not in self.points:
            raise ProblemError(
                f"{point!r} is not a point of this frontier of {len(self.points)} points: take one "
                "from frontier.points"
            )
        decided = self._decided[self.points.index(point)]
        return self._sweep.finish(decided, budget=f"{point.saved_bytes}B")

    def plot(
        self,
        path: str | Path,
        *,
        chosen: Plan | FrontierPoint | None = None,
        others: Sequence[Frontier] = (),
        title: str | None = None,
    ) -> None:
        """Draws the frontier over its bound, with its knee, as ``.svg`` or ``.png``.

        Args:
            path: where to; the suffix says which.
            chosen: a plan or a point to mark.
            others: frontiers of other solvers on the same graph, as further curves.
            title: what is drawn; the graph and the cost model where None.

        Raises:
            ProblemError: the path has another suffix, or ``others`` or ``chosen`` are of another
                graph or cost model.
            PlanError: Matplotlib is not installed, or the file cannot be written.
        """
        from remat.report.frontier_plot import Curve, draw_frontiers

        label = "chosen"
        if isinstance(chosen, Plan):
            label = f"plan at budget {Budget.parse(chosen.budget).label}"
            if (chosen.fingerprint, chosen.cost) != (self._sweep.fingerprint, self.cost):
                raise ProblemError(
                    f"{chosen!r} is of another graph or cost model ({chosen.cost}) than this "
                    f"frontier ({self.cost}) and cannot be marked on it; plan the frontier's graph"
                )
        curves = [
            Curve(
                label=f.solver,
                points=tuple((p.saved_bytes, p.recompute_cost) for p in f.points),
                bound=f.bound,
                knee=(f.knee().saved_bytes, f.knee().recompute_cost),
                unit=f.unit,
                full_bytes=f.full_bytes,
            )
            for f in (self, *others)
        ]
        mark = (label, (chosen.saved_bytes, chosen.recompute_cost)) if chosen else None
        heading = title or f"{self.graph}, cost model {self.cost}"
        draw_frontiers(curves, path, title=heading, chosen=mark)

    def to_json(self) -> str:
        """The frontier as JSON, without its plans."""
        data = {
            "remat_frontier": JSON_VERSION,
            "graph": self.graph,
            "solver": self.solver,
            "cost": self.cost,
            "unit": self.unit,
            "full_bytes": self.full_bytes,
            "least_bytes": self.least_bytes,
            "points": [
                {
                    "saved_bytes": p.saved_bytes,
                    "recompute_cost": p.recompute_cost,
                    "peak_bytes": p.peak_bytes,
                }
                for p in self.points
            ],
            "bound": [list(b) for b in self.bound],
        }
        return json.dumps(data, indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision for one graph, what it comes to, and how it came about."""

    decision: Decision
    saved_bytes: int
    cost: int
    choice: DecisionInfo


class Sweep:
    """One prepared graph, decided at many capacities; each capacity is decided once.

    Args:
        state: what `remat.planning.pipelines.prepare` returned.
        fingerprint: digest of its joint graph as it was captured.
        solver: who decides: on the graph where it can, else by a knapsack.
        cost: the cost model.
        time_limit: seconds for each decision; None: no clock.
        on_step: called with a line of text before each decision.
    """

    def __init__(
        self,
        state: State,
        *,
        fingerprint: str,
        solver: Solver,
        cost: CostModel,
        time_limit: float | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        require_tangents(state)
        self.state = replace(state, heeds_regions=False)  # whoever asks names the bytes
        self.solver, self.cost, self.time_limit = solver, cost, time_limit
        self.lowered: Lowered = self.state.lowered(cost)
        self.fingerprint = fingerprint
        self.declarations = ops.declarations()
        size = self.lowered.problem.size
        self.cut = self.state.get(RuntimeOptimalCut())
        self.least_bytes = sum(size[i] for i in least_decision(self.state))
        self.full_bytes = max(self.least_bytes, sum(size[i] for i in self.cut))
        self._at: dict[int, Decided] = {}
        self._peaks: dict[tuple[str, ...], int] = {}
        self._on_step = on_step or (lambda _: None)

    @cached_property
    def hull(self) -> Hull:
        return Hull.of(self.lowered.problem)

    @property
    def runtime_optimal(self) -> Decided:
        """What the cut without a budget decides."""
        return self._scored(self.cut, DecisionInfo(capacity=self.full_bytes))

    def at(self, capacity: int) -> Decided:
        """The decision within a number of bytes."""
        if capacity not in self._at:
            self._on_step(f"deciding at {format_bytes(capacity)}")
            self._at[capacity] = self._decide(capacity)
        return self._at[capacity]

    def peak(self, decided: Decided) -> int:
        """The simulated peak of a decision, in bytes."""
        key = (*decided.decision.saved, "|", *decided.decision.snapshots)
        if key not in self._peaks:
            self._on_step(f"simulating {format_bytes(decided.saved_bytes)}")
            done = split(replace(self.state, decision=decided.decision, choice=decided.choice))
            assert done.forward is not None
            assert done.backward is not None
            outputs = done.joint.num_fwd_outputs
            self._peaks[key] = simulate_peak(done.forward, done.backward, outputs).nbytes
        return self._peaks[key]

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
        best: list[Decided] = []
        for d in sorted(found, key=lambda d: (d.saved_bytes, d.cost)):
            if not best or d.cost < best[-1].cost:
                best.append(d)
        return tuple(best)

    def within_peak(self, peak_bytes: int) -> Decided:
        """The cheapest decision whose simulated peak is within a number of bytes.

        Raises:
            BudgetError: none is; the message names the least peak that was found.
        """
        cheapest = self.at(max(self.hull.ends[1].saved_bytes, self.full_bytes))
        if self.peak(cheapest) <= peak_bytes:
            return cheapest
        capacities = sorted(set(self.capacities()))
        tried = [cheapest, self.runtime_optimal]
        fits = [d for d in tried[1:] if self.peak(d) <= peak_bytes]
        for c in reversed(capacities):  # costs rise: what follows cannot beat what costs less
            if fits and self.hull.edge(c).bound(c) >= min(d.cost for d in fits):
                break
            tried.append(self.at(c))
            if self.peak(tried[-1]) <= peak_bytes:
                fits.append(tried[-1])
        if not fits:
            least = min(map(self.peak, tried))
            raise BudgetError(
                f"budget is a peak of {format_bytes(peak_bytes)} ({peak_bytes} bytes), but the least "
                f"peak of any plan found is {format_bytes(least)} ({least} bytes): weights, gradients "
                "and what one operator needs at once do not shrink with the budget. Raise the budget, "
                "or make the model or the batch smaller"
            )
        best = min(fits, key=lambda d: (d.cost, d.saved_bytes))
        # Between the best that fits and the next budget that was tried there may be better.
        low = best.saved_bytes
        high = min((c for c in capacities if c > low), default=low)
        for _ in range(6):
            if high - low <= low // 1000:
                break
            middle = self.at((low + high) // 2)
            if self.peak(middle) <= peak_bytes:
                best = min(best, middle, key=lambda d: (d.cost, d.saved_bytes))
                low = (low + high) // 2
            else:
                high = (low + high) // 2
        return best

    def finish(self, decided: Decided, *, budget: str, agree: Pass | None = None) -> Plan:
        """The plan of a decision, or of what ``agree`` makes of it."""
        choice = replace(decided.choice, full_bytes=self.full_bytes, least_bytes=self.least_bytes)
        state = replace(self.state, decision=decided.decision, choice=choice)
        if agree is not None:
            state = PassManager((agree,)).run(state, in_place=True, verify=False).state
        return finish(split(state), cost=self.cost, budget=budget, fingerprint=self.fingerprint)

    def frontier(self) -> Frontier:
        """The frontier over all budgets."""
        decided = self.pareto()
        return Frontier(
            graph=self.state.joint.name,
            solver=self.solver.name,
            cost=str(self.cost),
            unit=self.cost.unit,
            points=tuple(
                FrontierPoint(
                    saved_bytes=d.saved_bytes, recompute_cost=d.cost, peak_bytes=self.peak(d)
                )
                for d in decided
            ),
            bound=tuple((v.saved_bytes, v.cost) for v in self.hull.vertices),
            full_bytes=self.full_bytes,
            least_bytes=self.least_bytes,
            _sweep=self,
            _decided=decided,
        )

    def _decide(self, capacity: int) -> Decided:
        deciding = deciding_pass(
            budget=Budget(nbytes=capacity),
            solver=self.solver,
            cost=self.cost,
            time_limit=self.time_limit,
        )
        return self._scored(*deciding.decide(self.state))

    def _scored(self, saved: tuple[int, ...], choice: DecisionInfo) -> Decided:
        done = evaluate(self.lowered.problem, saved)
        return Decided(
            decision=self.lowered.decision(saved),
            saved_bytes=done.saved_bytes,
            cost=done.recompute_cost,
            choice=replace(choice, recompute_cost=done.recompute_cost),
        )


def plan_prepared(
    state: State,
    *,
    budget: Budget,
    solver: Solver,
    cost: CostModel,
    time_limit: float | None,
    fingerprint: str,
    agree: Pass | None = None,
) -> Plan:
    """Plans a state that `prepare` returned; the state can be planned again.

    ``agree`` is a pass that runs on the decision before it is carried out.
    """
    if budget.peak_bytes is not None:
        refuse_peak(budget, state.get(RegionBudget()))
        sweep = Sweep(
            state, fingerprint=fingerprint, solver=solver, cost=cost, time_limit=time_limit
        )
        return sweep.finish(sweep.within_peak(budget.peak_bytes), budget=str(budget), agree=agree)
    passes = decide(budget=budget, solver=solver, cost=cost, time_limit=time_limit)
    passes += () if agree is None else (agree,)
    decided = PassManager(passes).run(state, in_place=True, verify=False).state
    return finish(split(decided), cost=cost, budget=str(budget), fingerprint=fingerprint)
