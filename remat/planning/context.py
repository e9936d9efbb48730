"""The graph problem, costs, limits and options of one prepared graph, from which planning decides what to save.

A prepared graph is a joint graph after the passes that precede every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from remat.errors import ProblemError, warn
from remat.graph import ops
from remat.graph.joint import JointGraph
from remat.graph.memory.liveness import MemoryCurve
from remat.graph.problems.lowering import Lowered
from remat.passes.core.base import Pass
from remat.passes.core.provenance import Provenance, SavedLimits
from remat.passes.core.state import State
from remat.passes.decide.budgeted import RegionBudget, full_and_least
from remat.passes.decide.min_cut import RuntimeOptimalCut, require_tangents
from remat.passes.decide.policies import check_matched
from remat.planning.pipelines import count_workspaces, prepare, step_costs_of
from remat.planning.request import PlanRequest
from remat.planning.search.candidates import Candidate
from remat.planning.search.effort import DEFAULT
from remat.planning.search.offload_costs import Tagged, Times, tagged_values
from remat.solvers.auto import is_auto
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.problem import evaluate
from remat.units import Budget

#: Error of modelled times as a fraction of the step's time: the figure ``error_of_step`` of the benchmark ``step``, the
#: root mean square over 54 compiled plans, under `roofline-fused`.
COST_ERROR = 0.025


def check_joint(joint: object) -> None:
    """Raise a ProblemError unless ``joint`` is a `JointGraph`."""
    if not isinstance(joint, JointGraph):
        raise ProblemError(
            f"joint is a {type(joint).__name__}; expected a JointGraph: use remat.capture(model, args); "
            "several graphs of one step are what remat.plan takes as a list; for the graph of a whole step, use "
            "remat.whole_graph(gm)"
        )


def fingerprint_of(joint: JointGraph) -> str:
    """Return a joint graph's digest, which identifies its saved plans; raise a ProblemError for other types."""
    check_joint(joint)
    return joint.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Peak, cost and memory curve of the step without remat, with which plans are compared.

    Attributes:
        peak_bytes: simulated peak of the step; 0 if unknown.
        estimated_bytes: estimated peak of the step once Inductor has compiled it; 0 if unknown.
        cost: cost of the step, in the unit of the cost model; without the cost of running each operator once if the
            cost model cannot price backward.
        curve: bytes alive over the step; None if unknown.
    """

    peak_bytes: int = 0
    estimated_bytes: int = 0
    cost: int = 0
    curve: MemoryCurve | None = None


class GraphContext:
    """A prepared graph with the options of planning; searches read the context and never change it.

    Args:
        state: a state from `remat.planning.pipelines.prepare`; it is not changed.
        request: the options, among them solver and cost model.
        fingerprint: digest of the joint graph as it was captured.
        on_progress: called with a line of text before each stage of planning.
    """

    def __init__(
        self,
        state: State,
        request: PlanRequest,
        *,
        fingerprint: str,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        require_tangents(state)
        self.state, self.request, self.fingerprint = state, request, fingerprint
        # Operators that the user declares pure may run again, so decisions hold only as long as the declarations stay.
        self.declarations = ops.declarations()
        self.on_progress = on_progress or (lambda _: None)

    @classmethod
    def of(
        cls,
        joint: JointGraph,
        request: PlanRequest,
        *,
        fingerprint: str | None = None,
        in_place: bool = False,
        on_progress: Callable[[str], None] | None = None,
        at_budget: bool = False,
        on_demand: bool = False,
    ) -> Self:
        """Run the passes that precede decisions on a joint graph, and return its context.

        Args:
            joint: the captured step.
            request: the options.
            fingerprint: digest of the joint graph; None: computed from ``joint``.
            in_place: whether to change ``joint`` itself instead of a copy.
            on_progress: called with a line of text before each decision.
            at_budget: as in `remat.planning.pipelines.prepare`; False is used under a budget on the peak.
            on_demand: whether an operator's workspace is measured only when it is first read; False is used under a
                budget on the peak, because searches for the peak read all workspaces.
        """
        fingerprint, request = fingerprint or fingerprint_of(joint), request.with_graph_cost(joint)
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
        count_workspaces(state, request.cost, later=on_demand and not request.budget.on_peak)
        _warn_of_branches_drawn_anew(state)
        return cls(state, request, fingerprint=fingerprint, on_progress=on_progress)

    def with_request(self, request: PlanRequest) -> GraphContext:
        """Return a context of the same prepared graph under other options."""
        return GraphContext(
            self.state, request, fingerprint=self.fingerprint, on_progress=self.on_progress
        )

    def like(self, other: GraphContext) -> bool:
        """Return whether another context has an equal graph, and equal options (the budget may differ)."""
        request = replace(other.request, budget=self.request.budget)
        return other.fingerprint == self.fingerprint and request == self.request

    @cached_property
    def lowered(self) -> Lowered:
        """The graph problem, which asks which nodes to save, and the map from its nodes to those of the joint graph."""
        return self.state.lowered(self.request.cost)

    @cached_property
    def hull(self) -> Hull:
        """The lower convex hull of the graph problem's frontier: recompute cost over saved bytes."""
        return Hull.of(self.lowered.problem)

    def cuts(self, most: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return about ``most`` vertices of the `hull`, with both ends, each as a pair (saved bytes, saved nodes)."""
        vertices = self.hull.vertices
        some = {*range(0, len(vertices), max(1, len(vertices) // most)), len(vertices) - 1}
        invert = self.hull.reduction.invert
        return [(vertices[i].saved_bytes, invert(vertices[i].saved)) for i in sorted(some)]

    @cached_property
    def _limits(self) -> tuple[int, int]:
        """The bytes that the runtime-optimal partition saves, and the least bytes that any plan saves, as a pair."""
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
    def limits(self) -> SavedLimits:
        """Limits that allow a decision to save any number of bytes."""
        return SavedLimits(full_bytes=self.full_bytes, least_bytes=self.least_bytes)

    @cached_property
    def region_budget(self) -> float | None:
        """The budget, a ratio of saved bytes, that the user's code sets for the graph; None if it sets none."""
        return self.state.get(RegionBudget())

    @cached_property
    def most_saved(self) -> int | None:
        """Bytes that the user's code allows the graph to save, by `region_budget`; None if the code sets no limit."""
        own = self.region_budget
        if own is None:
            return None
        return Budget(share=own).capacity(full_bytes=self.full_bytes, least=self.least_bytes)

    def may_save(self, candidate: Candidate) -> bool:
        """Return whether a candidate saves at most the bytes that the user's code allows."""
        return self.most_saved is None or candidate.saved_bytes <= self.most_saved

    @property
    def is_alone(self) -> bool:
        """Whether the user named a solver other than ``auto``, so that only this solver decides."""
        return not is_auto(self.request.solver)

    @cached_property
    def is_eager(self) -> bool:
        """Whether the step runs its graphs uncompiled, so that no operators are fused."""
        return self.state.joint.lower == "eager"

    @cached_property
    def runtime_optimal(self) -> Candidate:
        """The decision of the runtime-optimal partition."""
        scored = evaluate(self.lowered.problem, self.state.get(RuntimeOptimalCut()))
        return Candidate(
            lowered=self.lowered,
            saved=scored.saved,
            saved_bytes=scored.saved_bytes,
            cost=scored.recompute_cost,
            provenance=Provenance(),
        )

    @cached_property
    def step_costs(self) -> Sequence[int]:
        """Cost of one run of each node of the joint graph; empty if the cost model cannot price backward."""
        return step_costs_of(self.state, self.request.cost)

    @property
    def step_cost(self) -> int:
        """Cost of running every operator of the step once; 0 if the cost model cannot price backward."""
        return sum(self.step_costs)

    def capacities(self, most: int | None = None) -> list[int]:
        """Return the limits on saved bytes, each at most ``most``, at which decisions of a frontier are made."""
        # Evenly spaced limits, and the saved bytes of vertices of the hull.
        vertices = [v.saved_bytes for v in self.hull.vertices]
        least, full_bytes = vertices[0], max(vertices[-1], self.full_bytes)
        limits = {
            least + (full_bytes - least) * i // DEFAULT.steps for i in range(DEFAULT.steps + 1)
        }
        limits.update(vertices[:: max(1, -(-len(vertices) // DEFAULT.vertices))])
        return sorted(c for c in limits if most is None or c <= most)

    # ---- the host's memory --------------------------------------------------------------------------
    @cached_property
    def tagged(self) -> list[Tagged]:
        """The values that the user tags for offloading; values that must be offloaded come first."""
        request, why = self.request, ""
        if request.hooks is not None:
            why = f"hooks={request.hooks.name!r} pack every saved value"
        elif request.cost.unit != "ps":
            why = f"copies take time, and cost model '{request.cost}' counts {request.cost.unit}"
        values = tagged_values(self.state, self.lowered)
        return [replace(tagged, why=tagged.why or why) for tagged in values]

    @property
    def may_offload(self) -> bool:
        """Whether any value may be offloaded, because the request has a link, or because the user tags a value."""
        return self.request.offload is not None or any(not t.why for t in self.tagged)

    @property
    def link(self) -> str:
        """The link to the host as text; empty if the request names no link and no value is tagged for offloading."""
        return str(self.request.link) if self.request.offload or self.tagged else ""

    @cached_property
    def times(self) -> Times:
        """Run times of the graph's operators."""
        return Times.of(self.state, self.request.cost)

    @cached_property
    def forward_time(self) -> int:
        """Summed run time in ps of all operators that forward can run, where each operator runs once."""
        late = self.state.roles.tangent_closure
        nodes = zip(self.state.index.nodes, late, strict=True)
        return sum(self.times.of_name[node.name] for node, is_late in nodes if not is_late)


def _warn_of_branches_drawn_anew(state: State) -> None:
    """Warn if the traced backward runs the random operators of a branch again."""
    # The backward of PyTorch's `cond` and `map` (2.11 to 2.15) calls the branch again, with other numbers. The joint
    # graph does not say which calls of forward and backward belong together, so no pass can repeat the numbers.
    higher = torch.ops.higher_order
    for node, is_late in zip(state.index.nodes, state.roles.tangent_closure, strict=True):
        if is_late and node.target in (higher.cond, higher.map_impl) and ops.is_random(node):
            warn(
                f"backward runs '{node.name}' ({ops.name_of(node.target)}), which draws other random numbers than "
                "forward did. So gradients are wrong, with and without remat: PyTorch traces dropout inside torch.cond "
                "and map so. Draw the mask outside of the branches, and pass the mask to them",
                UserWarning,
            )
            return
