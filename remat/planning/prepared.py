"""Planner of one prepared graph: decides once for each limit on saved bytes, and caches the decisions.

A prepared graph is a joint graph after the passes that precede every decision, such as common subexpression
elimination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

from remat.arguments import SOLVER
from remat.errors import ProblemError, suppress_warnings
from remat.graph import ops
from remat.graph.costs import CostModel
from remat.graph.costs.base import node_costs
from remat.graph.fused_liveness import predict_peak
from remat.graph.joint import JointGraph
from remat.graph.liveness import MemoryCurve, memory_curve
from remat.graph.lowering import Decision, Lowered
from remat.passes.core.base import Pass
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import Costs, State
from remat.passes.decide.budgeted import full_and_least
from remat.passes.decide.min_cut import RuntimeOptimalCut, require_tangents
from remat.passes.decide.policies import check_matched
from remat.planning.candidates import Candidate
from remat.planning.pipelines import count_workspaces, modules_of, prepare, split
from remat.planning.request import PlanRequest
from remat.solvers.auto import is_auto
from remat.solvers.graph_problem import evaluate
from remat.solvers.hull import Hull
from remat.solvers.pareto import pareto
from remat.units import format_bytes

#: A frontier (see `Prepared`) is decided at the ends of this number of equal intervals of saved bytes, and at vertices
#: of the hull.
STEPS = 24
#: Maximum number of vertices of the hull among the limits on saved bytes at which a frontier is decided.
VERTICES = 16
#: Error of modelled times as a fraction of the step's time: the figure ``error_of_step`` of the benchmark ``step``, the
#: root mean square over 54 compiled plans, under `roofline-fused`.
COST_ERROR = 0.025
#: Split graphs stay cached as long as they have at most this many nodes together. Two stay cached in any case.
_SPLIT_NODES = 20_000


def check_joint(joint: object) -> None:
    """Raise a ProblemError unless ``joint`` is a `JointGraph`."""
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args); "
            "several graphs of one step are what remat.plan takes as a list"
        )


def fingerprint_of(joint: JointGraph) -> str:
    """Return the digest of a joint graph, by which saved plans are matched to graphs.

    Raises:
        ProblemError: ``joint`` is not a `JointGraph`.
    """
    check_joint(joint)
    return joint.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Figures of the step without remat, to compare plans with.

    "Without remat" means under the default solver's plan for budget 1, without hooks on saved tensors.

    Attributes:
        peak_bytes: simulated peak of the step; 0 if unknown.
        expected_bytes: estimated peak of the step once Inductor has compiled it; 0 if unknown.
        recompute_cost: recompute cost of the step, in the unit of the cost model.
        curve: memory over the step; None if unknown.
    """

    peak_bytes: int = 0
    expected_bytes: int = 0
    recompute_cost: int = 0
    curve: MemoryCurve | None = None


def curve_of(state: State) -> MemoryCurve:
    """Return the simulated bytes alive over a step, from a state that `split` returned."""
    joint = state.joint
    return memory_curve(*modules_of(state), joint.num_fwd_outputs, joint.memories)


def step_costs_of(state: State, cost: CostModel, *, required: bool = False) -> Sequence[int]:
    """Return the cost of one run of each node of a step, by position in the joint graph.

    Nodes that only backward runs are included. If the cost model cannot price such a node, the whole result is empty.

    Args:
        state: a prepared graph, as `remat.planning.pipelines.prepare` returns it.
        cost: the cost model.
        required: whether to raise an error instead of an empty result.

    Raises:
        ProblemError: the cost model cannot price backward, and ``required`` is set.
    """
    late = [i for i, only_backward in enumerate(state.roles.tangent_closure) if only_backward]
    try:
        backward = node_costs(state.index, state.storages, cost, late)
    except ProblemError:
        if required:
            raise
        return ()
    # Both lists have an entry for every position. One list prices the nodes that forward can run, the other list the
    # nodes that only backward runs; each is 0 elsewhere.
    return [a + b for a, b in zip(state.get(Costs(cost)), backward, strict=True)]


class Prepared:
    """Planner that decides one prepared graph within any limit on saved bytes, and caches the decisions.

    The *graph problem* asks which nodes to save, so that recomputing the others costs least. Its *frontier* is the
    least recompute cost for each number of saved bytes. The *hull* is the frontier's lower convex hull. *Budget 1*
    allows the bytes that the runtime-optimal partition saves: the minimum cut that recomputes only cheap operators.

    Args:
        state: a state from `remat.planning.pipelines.prepare`; it is not changed.
        request: the options, among them solver and cost model.
        fingerprint: digest of the joint graph as it was captured.
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
        # Operators that the user declares pure may run again, so decisions hold only as long as the declarations stay.
        self.declarations = ops.declarations()
        self.deciding = request.deciding()
        #: Bytes that values of this graph may take in the host's memory; None: no limit.
        self.host_bytes = request.host_memory
        self.decisions: dict[int, Candidate] = {}
        self._peaks: dict[Decision, int] = {}
        self._expected: dict[Decision, int] = {}
        #: The decision under budget 1; None until `full` is read.
        self._full: Candidate | None = None
        #: Memory over the step at budget 1; None until `peak` has simulated it.
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
        at_budget: bool = False,
    ) -> Self:
        """Run the passes that precede decisions on a joint graph, and return its planner.

        Args:
            joint: the captured step.
            request: the options.
            fingerprint: digest of the joint graph; None: computed here.
            in_place: whether to change ``joint`` itself instead of a copy.
            on_step: called with a line of text before each decision.
            at_budget: as in `remat.planning.pipelines.prepare`; False is used under a budget on the peak.
        """
        fingerprint, request = fingerprint or fingerprint_of(joint), request.on(joint)
        if request.policies and not request.has_matched:
            check_matched(request.policies, [joint.graph], joint.name)
        state = prepare(
            joint,
            in_place=in_place,
            count_outputs=request.count_outputs,
            hooks=request.hooks,
            reread_inputs=request.reread_inputs,
            policies=request.policies,
            deciding=request.deciding(),
            at_budget=at_budget and not request.budget.on_peak,
            chunk=request.chunk if isinstance(request.chunk, Pass) else None,
        )
        count_workspaces(state, request.cost)
        return cls(state, request, fingerprint=fingerprint, on_step=on_step)

    @cached_property
    def lowered(self) -> Lowered:
        """The graph problem, which asks which nodes to save, and the map from its nodes to the joint graph."""
        return self.state.lowered(self.request.cost)

    @cached_property
    def hull(self) -> Hull:
        """The lower convex hull of the graph problem's frontier: recompute cost over saved bytes."""
        return Hull.of(self.lowered.problem)

    def cuts(self, most: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return up to about ``most`` vertices of the `hull` of decisions by saved bytes and cost, both ends included.

        Returns:
            For each vertex: the saved bytes of its decision, and the saved nodes of the graph problem.
        """
        vertices = self.hull.vertices
        some = {*range(0, len(vertices), max(1, len(vertices) // most)), len(vertices) - 1}
        invert = self.hull.reduction.invert
        return [(vertices[i].saved_bytes, invert(vertices[i].saved)) for i in sorted(some)]

    @cached_property
    def _limits(self) -> tuple[int, int]:
        """Two numbers: the bytes that the runtime-optimal partition saves, and the least bytes that any plan saves."""
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
        """The decision under budget 1, which saves at most as many bytes as the runtime-optimal partition.

        A solver that the user named decides alone. For the default solver, see `_better_than_cut`.
        """
        if self._full is None:
            usual = is_auto(self.request.solver)
            solved = partial(self.at, self.full_bytes)
            self._full = self._better_than_cut(solved) if usual else solved()
        return self._full

    @cached_property
    def without_remat(self) -> Candidate:
        """The decision of the step without remat: that of the default solver under budget 1.

        The decision does not depend on the requested solver, so that all solvers are compared with the same step.
        """
        if is_auto(self.request.solver):
            return self.full
        usual = replace(self.request.by(SOLVER), time_limit=None)
        return self._better_than_cut(partial(self.decided, self.choice(self.full_bytes), usual))

    def _better_than_cut(self, solved: Callable[[], Candidate]) -> Candidate:
        """Return the solver's decision at budget 1, or the runtime-optimal partition unless the former is surely better.

        So a step without a budget is no worse than without remat. The solver's decision is surely better if its peak is
        no higher, and its modelled cost is lower by more than the error of the cost model. For Inductor, the peaks are
        estimated. If not even the lower bound on the cost is that low, the solver is not called.

        Args:
            solved: calls the solver for its decision at budget 1.
        """
        cut, error = self.runtime_optimal, COST_ERROR * self.step_cost
        bound = self.hull.edge(self.full_bytes).bound(self.full_bytes)
        if cut.cost - bound > error:
            found = solved()
            peak = self.peak if self.state.joint.lower == "eager" else self.expected
            if cut.cost - found.cost > error and peak(found) <= peak(cut):
                return found
        return replace(cut, choice=replace(cut.choice, recompute_bound=min(cut.cost, bound)))

    def at(self, capacity: int) -> Candidate:
        """Return the solver's decision that saves at most ``capacity`` bytes, cached.

        A budget that the user's code sets for the graph is ignored.
        """
        if capacity not in self.decisions:
            self.on_step(f"deciding at {format_bytes(capacity)}")
            self.decisions[capacity] = self.decided(self.choice(capacity))
        return self.decisions[capacity]

    def adopt(self, other: Prepared) -> bool:
        """Copy the cached decisions and peaks of another planner into this one.

        Nothing is copied unless both planners have equal graphs, and equal options except the budget.

        Returns:
            Whether decisions and peaks were copied.
        """
        request = replace(other.request, budget=self.request.budget)
        if other.fingerprint != self.fingerprint or request != self.request:
            return False
        self.decisions |= {n: replace(d, lowered=self.lowered) for n, d in other.decisions.items()}
        self._peaks |= other._peaks
        self._expected |= other._expected
        self._full = other._full and replace(other._full, lowered=self.lowered)
        self.full_curve = other.full_curve
        return True

    def choice(self, capacity: int) -> DecisionInfo:
        """Return a record with the limits of a decision that may save ``capacity`` bytes; `decided` adds the solver."""
        return DecisionInfo(
            capacity=capacity, full_bytes=self.full_bytes, least_bytes=self.least_bytes
        )

    def decided(self, limits: DecisionInfo, request: PlanRequest | None = None) -> Candidate:
        """Return a solver's decision within limits; the decision is not cached.

        Args:
            limits: the limits on saved bytes, see `choice`.
            request: the options, with the solver to call; None: the options of this planner.
        """
        # Hulls are cached weakly. This reference keeps one alive, so that every decision shares it.
        _ = self.hull
        deciding = self.deciding if request is None else request.deciding()
        found, choice = deciding.decide(self.state, limits)
        return Candidate(
            lowered=self.lowered,
            saved=found.saved,
            saved_bytes=found.saved_bytes,
            cost=found.cost,
            choice=choice,
        )

    def informed(self, found: Candidate) -> Candidate:
        """Return a copy of a candidate that a search by peak found, with its record ``choice`` filled in.

        The record gets the limits on saved bytes, the solver, the number of nodes, and the solver's seconds for all
        cached decisions.
        """
        # The search starts from the cached decisions. So their time counts, and the search is deterministic only if
        # each of them is.
        asked = [d.choice for d in self.decisions.values()]
        choice = replace(
            self.choice(max(self.full_bytes, found.saved_bytes)),
            solver=self.deciding.asked().name,
            items=len(self.lowered.problem),
            elapsed_s=sum(c.elapsed_s for c in asked),
            deterministic=found.choice.deterministic and all(c.deterministic for c in asked),
        )
        return replace(found, choice=choice)

    @property
    def runtime_optimal(self) -> Candidate:
        """The decision of the runtime-optimal partition: the minimum cut that recomputes only cheap operators."""
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
        """The decision with the least recompute cost, at any number of saved bytes."""
        return self.at(max(self.hull.ends[1].saved_bytes, self.full_bytes))

    def peak(self, decided: Candidate) -> int:
        """Return the simulated peak of a decision in bytes, cached."""
        key = decided.decision
        if key not in self._peaks:
            self.on_step(f"simulating {format_bytes(decided.saved_bytes)}")
            curve = curve_of(self.split_of(decided))
            self._peaks[key] = curve.peak_bytes
            if self._full is not None and key == self._full.decision:
                self.full_curve = curve
                # Every plan for Inductor reports this estimate. The modules that it needs are already split here.
                if self.state.joint.lower != "eager":
                    self.expected(decided)
        return self._peaks[key]

    def expected(self, decided: Candidate) -> int:
        """Return the estimated peak of the step under a decision, once Inductor has fused it, in bytes; cached."""
        key = decided.decision
        if key not in self._expected:
            done = self.split_of(decided)
            joint = done.joint
            self._expected[key] = predict_peak(
                *modules_of(done), joint.num_fwd_outputs, joint.memories
            )
        return self._expected[key]

    def split_of(self, decided: Candidate) -> State:
        """Return the graph split by a decision into forward and backward; the last few results stay cached."""
        done = self._splits.pop(decided.decision, None)
        if done is None:
            with suppress_warnings():  # the decision may never become a plan
                done = self.split(decided)
        # Removed above and inserted again, so that the dict is in order of last use.
        self._splits[decided.decision] = done
        while len(self._splits) > max(2, _SPLIT_NODES // len(self.state.index)):
            del self._splits[next(iter(self._splits))]
        return done

    def split(self, decided: Candidate) -> State:
        """Return the graph split by a decision into forward and backward; the result is not cached."""
        return split(replace(self.state, decision=decided.decision, choice=decided.choice))

    @cached_property
    def step_costs(self) -> Sequence[int]:
        """Cost of one run of each node of the step, by position in the joint graph.

        Empty if the cost model cannot price backward.
        """
        return step_costs_of(self.state, self.request.cost)

    @property
    def step_cost(self) -> int:
        """Cost of running every operator of the step once; 0 if the cost model cannot price backward."""
        return sum(self.step_costs)

    def capacities(self, most: int | None = None) -> list[int]:
        """Return the limits on saved bytes at which a frontier is decided, in bytes, lowest first.

        The limits are evenly spaced numbers, and the saved bytes of vertices of the hull.

        Args:
            most: leave out limits above this number of bytes; None: leave out none.
        """
        vertices = [v.saved_bytes for v in self.hull.vertices]
        least, full = vertices[0], max(vertices[-1], self.full_bytes)
        limits = {least + (full - least) * i // STEPS for i in range(STEPS + 1)}
        limits.update(vertices[:: max(1, -(-len(vertices) // VERTICES))])
        return sorted(c for c in limits if most is None or c <= most)

    def pareto(self) -> tuple[Candidate, ...]:
        """Decide at each limit of `capacities`; return the decisions that are Pareto-optimal by (saved bytes, cost).

        The decision with the fewest saved bytes comes first.
        """
        found = map(self.at, self.capacities())
        return tuple(pareto(found, lambda d: (d.saved_bytes, d.cost)))
