"""The analyses that passes share, and the conditions that pipelines may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils.checkpoint import CheckpointPolicy

from remat.graph import ops
from remat.graph.joint import Role
from remat.graph.liveness import Timeline, timeline
from remat.graph.roles import distances
from remat.passes.core.state import Analysis, State, halves_of
from remat.passes.core.state import Classification as Classification
from remat.passes.core.state import Costs as Costs
from remat.passes.core.state import GraphProblemOf as GraphProblemOf
from remat.passes.core.state import Memory as Memory
from remat.passes.core.state import Positions as Positions


@dataclass(frozen=True)
class Distances(Analysis[tuple[int, ...]]):
    """Edges from each forward node to backward."""

    name: ClassVar[str] = "distances"
    summary: ClassVar[str] = "edges between each forward node and backward"

    def compute(self, state: State) -> tuple[int, ...]:
        return distances(state.index, state.roles)


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
