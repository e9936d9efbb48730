"""A prepared graph with cached decisions: each byte limit is decided once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from remat.errors import ProblemError, suppress_warnings
from remat.graph import ops
from remat.graph.costs import CostModel
from remat.graph.costs.base import node_costs
from remat.graph.fused_liveness import predict_peak
from remat.graph.joint import JointGraph
from remat.graph.liveness import MemoryCurve, memory_curve
from remat.graph.lowering import Decision, Lowered
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import Costs, State
from remat.passes.decide.budgeted import full_and_least
from remat.passes.decide.min_cut import RuntimeOptimalCut, require_tangents
from remat.planning.candidates import Candidate, pareto
from remat.planning.pipelines import count_workspaces, prepare, split
from remat.planning.request import PlanRequest
from remat.solvers.graph_problem import evaluate
from remat.solvers.hull import Hull
from remat.units import format_bytes

#: Budgets that a frontier looks at, besides the vertices of the hull.
STEPS = 24
#: Vertices of the hull that it looks at, at most.
VERTICES = 16
#: Nodes of all partitioned graphs that stay in memory, unless two have more.
_SPLIT_NODES = 20_000


#: A decision with its saved bytes, its cost, how it came about, and its simulated peak.
Answer = tuple[Decision, int, int, DecisionInfo, int]


def fingerprint_of(joint: JointGraph) -> str:
    """The digest of a joint graph."""
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args); "
            "several graphs of one step are what remat.plan takes as a list"
        )
    return joint.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The step without remat: at budget 1, and without hooks on what is saved.

    Attributes:
        peak_bytes: its simulated peak; 0 if it is not known.
        expected_bytes: the peak that is estimated of it once Inductor has compiled it; 0 if it is not known.
        recompute_cost: cost of what runs twice in it, in the unit of the cost model.
        curve: its memory over the step; None if it is not known.
    """

    peak_bytes: int = 0
    expected_bytes: int = 0
    recompute_cost: int = 0
    curve: MemoryCurve | None = None


def curve_of(state: State) -> MemoryCurve:
    """Simulate the memory over a partitioned step."""
    assert state.forward is not None
    assert state.backward is not None
    joint = state.joint
    return memory_curve(state.forward, state.backward, joint.num_fwd_outputs, joint.memories)


def step_costs_of(state: State, cost: CostModel, *, required: bool = False) -> Sequence[int]:
    """Price one run of each node of a step, backward's own included, by position.

    Args:
        state: a prepared graph.
        cost: the cost model.
        required: whether a model that cannot price backward is an error; else there are no costs then.

    Raises:
        ProblemError: the cost model cannot price backward.
    """
    late = [i for i, only_backward in enumerate(state.roles.tangent_closure) if only_backward]
    try:
        backward = node_costs(state.index, state.storages, cost, late)
    except ProblemError:
        if required:
            raise
        return ()
    return [a + b for a, b in zip(state.get(Costs(cost)), backward, strict=True)]


class Prepared:
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
        self.decisions: dict[int, Candidate] = {}
        self._peaks: dict[Decision, int] = {}
        self._expected: dict[Decision, int] = {}
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
    def full(self) -> Candidate:
        """The decision under budget 1."""
        return self.at(self.full_bytes)

    def at(self, capacity: int) -> Candidate:
        """The decision within a number of bytes, whatever the code sets for its region."""
        if capacity not in self.decisions:
            self.on_step(f"deciding at {format_bytes(capacity)}")
            self.decisions[capacity] = self.decided(self.choice(capacity))
        return self.decisions[capacity]

    def learn(self, answer: Answer) -> None:
        """Cache a decision of another planner under the byte limit of its choice, with its peak."""
        decision, saved_bytes, cost, choice, peak_bytes = answer
        made = Candidate.of(self.lowered, decision, cost, choice)
        self.decisions[choice.capacity or 0] = replace(made, saved_bytes=saved_bytes)
        self._peaks[decision] = peak_bytes

    def answer(self, decided: Candidate) -> Answer:
        """A decision for a planner of the same graph elsewhere."""
        peak_bytes = self.peak(decided)
        return decided.decision, decided.saved_bytes, decided.cost, decided.choice, peak_bytes

    def choice(self, capacity: int) -> DecisionInfo:
        """Describe how a decision within a byte limit will be made, as far as known beforehand."""
        return DecisionInfo(
            capacity=capacity, full_bytes=self.full_bytes, least_bytes=self.least_bytes
        )

    def decided(self, limits: DecisionInfo) -> Candidate:
        """The decision within limits."""
        _ = self.hull  # held here, so that every decision shares it
        found, choice = self.deciding.decide(self.state, limits)
        return Candidate(
            lowered=self.lowered,
            saved=found.saved,
            saved_bytes=found.saved_bytes,
            cost=found.cost,
            choice=choice,
        )

    @property
    def runtime_optimal(self) -> Candidate:
        """The decision of the cut without a budget."""
        scored = evaluate(self.lowered.problem, self.state.get(RuntimeOptimalCut()))
        return Candidate(
            lowered=self.lowered,
            saved=scored.saved,
            saved_bytes=scored.saved_bytes,
            cost=scored.recompute_cost,
            choice=self.choice(self.full_bytes),
        )

    @cached_property
    def cheapest(self) -> Candidate:
        """The decision that recomputes least, whatever it saves."""
        return self.at(max(self.hull.ends[1].saved_bytes, self.full_bytes))

    def peak(self, decided: Candidate) -> int:
        """The simulated peak of a decision, in bytes."""
        key = decided.decision
        if key not in self._peaks:
            self.on_step(f"simulating {format_bytes(decided.saved_bytes)}")
            curve = curve_of(self.split_of(decided))
            self._peaks[key] = curve.peak_bytes
            if decided is self.decisions.get(self.full_bytes):
                self.full_curve = curve
                self.running(decided)  # every plan tells it, and the two modules are here now
        return self._peaks[key]

    def running(self, decided: Candidate) -> int:
        """The peak in the lowering that runs: simulated for eager, estimated for Inductor."""
        if self.state.joint.lower == "eager":
            return self.peak(decided)
        return self.expected(decided)

    def expected(self, decided: Candidate) -> int:
        """The estimated peak of fused code, in bytes."""
        key = decided.decision
        if key not in self._expected:
            done = self.split_of(decided)
            assert done.forward is not None
            assert done.backward is not None
            outputs, memories = done.joint.num_fwd_outputs, done.joint.memories
            self._expected[key] = predict_peak(
                done.forward, done.backward, outputs, memories
            ).nbytes
        return self._expected[key]

    def split_of(self, decided: Candidate) -> State:
        """The two modules of a decision; those of the last few decisions stay in memory."""
        done = self._splits.pop(decided.decision, None)
        if done is None:
            with suppress_warnings():  # a trial, which may never become a plan
                done = self.split(decided)
        self._splits[decided.decision] = done
        while len(self._splits) > max(2, _SPLIT_NODES // len(self.state.index)):
            del self._splits[next(iter(self._splits))]
        return done

    def take_split(self, decided: Candidate) -> State:
        """The two modules of a decision, owned by the caller; the next call builds new ones."""
        done = self.split_of(decided)
        del self._splits[decided.decision]
        return done

    def split(self, decided: Candidate) -> State:
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
        """The budgets of a frontier: even steps between its ends, and vertices of the hull."""
        vertices = [v.saved_bytes for v in self.hull.vertices]
        least, most = vertices[0], max(vertices[-1], self.full_bytes)
        yield from (least + (most - least) * i // STEPS for i in range(STEPS + 1))
        every = max(1, -(-len(vertices) // VERTICES))
        yield from vertices[::every]

    def pareto(self) -> tuple[Candidate, ...]:
        """The Pareto-optimal decisions at these budgets, fewest bytes first."""
        found = [self.at(c) for c in sorted(set(self.capacities()))]
        return tuple(pareto(found, lambda d: (d.saved_bytes, d.cost)))
