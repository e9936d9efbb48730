"""What a step takes without remat: its memory, and the cost of all its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.errors import ProblemError
from remat.graph.costs import CostModel
from remat.graph.costs.base import node_costs
from remat.graph.liveness import MemoryCurve, memory_curve
from remat.passes.core.state import Costs, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """A step without remat.

    Attributes:
        peak_bytes: its simulated peak; 0 where it is not known.
        expected_bytes: the peak that is expected of it once Inductor has compiled it; 0 where it is not known.
        recompute_cost: cost of what runs twice in it, in the unit of the cost model.
        curve: its memory over the step; None where it is not known.
    """

    peak_bytes: int = 0
    expected_bytes: int = 0
    recompute_cost: int = 0
    curve: MemoryCurve | None = None


def curve_of(state: State) -> MemoryCurve:
    """Memory over a step that is split, as simulated."""
    assert state.forward is not None
    assert state.backward is not None
    joint = state.joint
    return memory_curve(state.forward, state.backward, joint.num_fwd_outputs, joint.memories)


def step_costs_of(state: State, cost: CostModel) -> Sequence[int]:
    """What running each node of a step once costs, by position; empty where the model cannot price backward."""
    late = [i for i, only_backward in enumerate(state.roles.tangent_closure) if only_backward]
    try:
        backward = node_costs(state.index, state.storages, cost, late)
    except ProblemError:  # planning never asks about backward's own operators
        return ()
    return [a + b for a, b in zip(state.get(Costs(cost)), backward, strict=True)]
