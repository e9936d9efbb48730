"""The analyses that passes share: positions, roles, distances, memory, costs, the graph problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph import ops
from remat.graph.costs import CostModel, node_costs
from remat.graph.index import GraphIndex, index_graph
from remat.graph.joint import Role
from remat.graph.liveness import Timeline, timeline
from remat.graph.lowering import Lowered, lower
from remat.graph.roles import Roles, classify, distances
from remat.graph.storages import Storages, find_storages
from remat.passes.analysis import Analysis
from remat.passes.base import State, halves_of


@dataclass(frozen=True)
class Positions(Analysis[GraphIndex]):
    """The joint graph as integers: positions, inputs, users."""

    name: ClassVar[str] = "positions"
    summary: ClassVar[str] = "nodes, inputs and users as integers"

    def compute(self, state: State) -> GraphIndex:
        return index_graph(state.joint.graph)


@dataclass(frozen=True)
class Classification(Analysis[Roles]):
    """Which half each node belongs to (SPEC A1)."""

    name: ClassVar[str] = "classification"
    summary: ClassVar[str] = "forward, backward and unclaimed nodes"

    def compute(self, state: State) -> Roles:
        return classify(state.joint, state.index)


@dataclass(frozen=True)
class Distances(Analysis[tuple[int, ...]]):
    """Edges from each forward node to backward (SPEC A3)."""

    name: ClassVar[str] = "distances"
    summary: ClassVar[str] = "edges between each forward node and backward"

    def compute(self, state: State) -> tuple[int, ...]:
        return distances(state.index, state.roles)


@dataclass(frozen=True)
class Memory(Analysis[Storages]):
    """Which values share memory, and how many bytes each memory takes."""

    name: ClassVar[str] = "storages"
    summary: ClassVar[str] = "who shares memory, bytes, what is alive anyway"

    def compute(self, state: State) -> Storages:
        return find_storages(
            state.joint,
            state.index,
            state.roles,
            count_outputs=state.count_outputs,
            refilled=() if state.reread_inputs else sorted(state.refillable),
        )


@dataclass(frozen=True)
class Costs(Analysis[tuple[int, ...]]):
    """What running each node costs under a cost model, in its unit.

    Only what could run twice is priced: what depends on a tangent costs 0.
    """

    name: ClassVar[str] = "costs"
    summary: ClassVar[str] = "cost of running each node that could run twice"

    cost: CostModel

    def compute(self, state: State) -> tuple[int, ...]:
        once = state.roles.tangent_closure
        positions = [i for i, only_backward in enumerate(once) if not only_backward]
        return tuple(node_costs(state.index, state.storages, self.cost, positions))


@dataclass(frozen=True)
class GraphProblemOf(Analysis[Lowered]):
    """The graph problem; every node costs 1 where no cost model is given."""

    name: ClassVar[str] = "graph-problem"
    summary: ClassVar[str] = "the decision as a problem in integers"

    cost: CostModel | None = None

    def compute(self, state: State) -> Lowered:
        if self.cost is None:
            unit = [1] * len(state.index)
            return lower(state.index, state.roles, state.storages, unit, "op")
        return state.lowered().priced(state.get(Costs(self.cost)), self.cost.unit)


@dataclass(frozen=True)
class Liveness(Analysis[Timeline]):
    """What is alive when, over forward and then backward."""

    name: ClassVar[str] = "liveness"
    summary: ClassVar[str] = "lifetimes of storages over both halves, and their peak"
    of_halves: ClassVar[bool] = True

    def compute(self, state: State) -> Timeline:
        return timeline(*halves_of(state, self.name), state.joint.num_fwd_outputs)


@dataclass(frozen=True)
class Differentiable(Analysis[bool]):
    """Whether anything is differentiated."""

    name: ClassVar[str] = "differentiable"
    summary: ClassVar[str] = "condition: there is a backward"

    def compute(self, state: State) -> bool:
        return Role.TANGENT in state.roles.placeholders.values()


@dataclass(frozen=True)
class Random(Analysis[bool]):
    """Whether anything draws random numbers."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "condition: something draws random numbers"

    def compute(self, state: State) -> bool:
        return any(n.op == "call_function" and ops.is_random(n) for n in state.index.nodes)


@dataclass(frozen=True)
class Mutating(Analysis[bool]):
    """Whether the step writes to memory that it did not make."""

    name: ClassVar[str] = "mutating"
    summary: ClassVar[str] = "condition: something is written in place"

    def compute(self, state: State) -> bool:
        return any(map(ops.is_mutating, state.index.nodes))


@dataclass(frozen=True)
class Tagged(Analysis[bool]):
    """Whether the user has tagged anything with a checkpoint policy."""

    name: ClassVar[str] = "tagged"
    summary: ClassVar[str] = "condition: some node carries a checkpoint policy"

    def compute(self, state: State) -> bool:
        return any(isinstance(n.meta.get("recompute"), CheckpointPolicy) for n in state.index.nodes)


@dataclass(frozen=True)
class DynamicShapes(Analysis[bool]):
    """Whether any size is symbolic."""

    name: ClassVar[str] = "dynamic-shapes"
    summary: ClassVar[str] = "condition: some size is symbolic"

    def compute(self, state: State) -> bool:
        values = (n.meta.get("val") for n in state.index.nodes)
        return any(
            isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool))
            or (isinstance(v, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in v.shape))
            for v in values
        )


@dataclass(frozen=True)
class Partitioned(Analysis[bool]):
    """Whether the joint graph has been split."""

    name: ClassVar[str] = "partitioned"
    summary: ClassVar[str] = "condition: forward and backward are two modules"
    of_halves: ClassVar[bool] = True

    def compute(self, state: State) -> bool:
        return state.forward is not None and state.backward is not None
