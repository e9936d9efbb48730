"""One prepared graph and the decisions on it: each number of bytes is decided once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from remat.errors import ProblemError, unwarned
from remat.graph import ops
from remat.graph.joint import JointGraph
from remat.graph.liveness import MemoryCurve, memory_curve
from remat.graph.lowering import Decision, Lowered
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import State
from remat.passes.decide.budgeted import full_and_least
from remat.passes.decide.min_cut import RuntimeOptimalCut, require_tangents
from remat.planning.peak_frontier import pareto
from remat.planning.pipelines import count_workspaces, prepare, split
from remat.planning.request import PlanRequest
from remat.planning.without import step_costs_of
from remat.solvers.graph_problem import evaluate
from remat.solvers.hull import Hull
from remat.units import format_bytes

#: Budgets that a frontier looks at, besides the vertices of the hull.
STEPS = 24
#: Vertices of the hull that it looks at, at most.
VERTICES = 16


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


def fingerprint_of(joint: JointGraph) -> str:
    """The digest of a joint graph; anything else is refused."""
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args); "
            "several graphs of one step are what remat.plan takes as a list"
        )
    return joint.fingerprint


class Decider:
    """Decides one prepared graph within any number of bytes.

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
        self.deciding = request.deciding()
        self.decisions: dict[int, Decided] = {}
        self._peaks: dict[Decision, int] = {}
        #: Memory over budget 1's step, once it was simulated.
        self.full_curve: MemoryCurve | None = None
        self._splits: dict[Decision, State] = {}
        self.on_step = on_step or (lambda _: None)

    @classmethod
    def of(
        cls,
        joint: JointGraph,
        request: PlanRequest,
        *,
        fingerprint: str | None = None,
        in_place: bool = False,
        on_step: Callable[[str], None] | None = None,
    ) -> Self:
        """Prepares a joint graph."""
        fingerprint, request = fingerprint or fingerprint_of(joint), request.on(joint)
        state = prepare(
            joint,
            in_place=in_place,
            count_outputs=request.count_outputs,
            hooks=request.hooks,
            reread_inputs=request.reread_inputs,
        )
        count_workspaces(state, request.cost)
        return cls(state, request, fingerprint=fingerprint, on_step=on_step)

    @cached_property
    def lowered(self) -> Lowered:
        """The graph problem."""
        return self.state.lowered(self.request.cost)

    @cached_property
    def hull(self) -> Hull:
        """The lower hull of its frontier."""
        return Hull.of(self.lowered.problem)

    def cuts(self, most: int) -> list[tuple[int, tuple[int, ...]]]:
        """Vertices of the hull, about ``most`` of them with both ends: saved bytes, and what is saved."""
        vertices = self.hull.vertices
        some = {*range(0, len(vertices), max(1, len(vertices) // most)), len(vertices) - 1}
        invert = self.hull.reduction.invert
        return [(vertices[i].saved_bytes, invert(vertices[i].saved)) for i in sorted(some)]

    def saved_of(self, decided: Decided) -> tuple[int, ...]:
        """What a decision saves, by positions in the graph problem."""
        return self.lowered.saved_of(decided.decision)

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

    @property
    def full(self) -> Decided:
        """The decision under budget 1."""
        return self.at(self.full_bytes)

    def at(self, capacity: int) -> Decided:
        """The decision within a number of bytes, whatever the code sets for its region."""
        if capacity not in self.decisions:
            self.on_step(f"deciding at {format_bytes(capacity)}")
            self.decisions[capacity] = self.decided(self.choice(capacity))
        return self.decisions[capacity]

    def learn(self, decided: Decided, peak_bytes: int) -> None:
        """Takes over a decision that was made elsewhere within the bytes that its choice names, with its peak."""
        self.decisions[decided.choice.capacity or 0] = decided
        self._peaks[decided.decision] = peak_bytes

    def choice(self, capacity: int) -> DecisionInfo:
        """How a decision within so many bytes comes about, as far as is known before."""
        return DecisionInfo(
            capacity=capacity, full_bytes=self.full_bytes, least_bytes=self.least_bytes
        )

    def decided(self, limits: DecisionInfo) -> Decided:
        """The decision within limits."""
        _ = self.hull  # held here, so that every decision shares it
        found, choice = self.deciding.decide(self.state, limits)
        return Decided(
            decision=self.lowered.decision(found.saved),
            saved_bytes=found.saved_bytes,
            cost=found.cost,
            choice=choice,
        )

    @property
    def runtime_optimal(self) -> Decided:
        """What the cut without a budget decides."""
        scored = evaluate(self.lowered.problem, self.state.get(RuntimeOptimalCut()))
        return Decided(
            decision=self.lowered.decision(scored.saved),
            saved_bytes=scored.saved_bytes,
            cost=scored.recompute_cost,
            choice=self.choice(self.full_bytes),
        )

    @cached_property
    def cheapest(self) -> Decided:
        """The decision that recomputes least, whatever it saves."""
        return self.at(max(self.hull.ends[1].saved_bytes, self.full_bytes))

    def peak(self, decided: Decided) -> int:
        """The simulated peak of a decision, in bytes."""
        key = decided.decision
        if key not in self._peaks:
            self.on_step(f"simulating {format_bytes(decided.saved_bytes)}")
            done = self.split_of(decided)
            assert done.forward is not None
            assert done.backward is not None
            outputs = done.joint.num_fwd_outputs
            curve = memory_curve(done.forward, done.backward, outputs, done.joint.memories)
            self._peaks[key] = curve.peak_bytes
            if decided is self.decisions.get(self.full_bytes):
                self.full_curve = curve
        return self._peaks[key]

    def split_of(self, decided: Decided) -> State:
        """The two modules of a decision; those of the last two decisions stay in memory."""
        done = self._splits.pop(decided.decision, None)
        if done is None:
            with unwarned():  # it may be no plan
                done = self.split(decided)
        self._splits[decided.decision] = done
        while len(self._splits) > 2:
            del self._splits[next(iter(self._splits))]
        return done

    def take_split(self, decided: Decided) -> State:
        """The two modules of a decision, for whoever hands them out: they are made anew for the next."""
        done = self.split_of(decided)
        del self._splits[decided.decision]
        return done

    def split(self, decided: Decided) -> State:
        """The two modules of a decision."""
        return split(replace(self.state, decision=decided.decision, choice=decided.choice))

    @cached_property
    def step_costs(self) -> Sequence[int]:
        """Cost of running each node of the step once; empty where backward cannot be priced."""
        return step_costs_of(self.state, self.request.cost)

    @property
    def step_cost(self) -> int:
        """Cost of running every operator of the step once; 0 where backward cannot be priced."""
        return sum(self.step_costs)

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
