"""Costs of the nodes of small graphs."""

from __future__ import annotations

import remat
from remat.graph.costs import CostModel, node_costs
from remat.passes.core.state import State


def costs(joint: remat.JointGraph, model: CostModel) -> dict[str, int]:
    """What each node costs under a model, by name."""
    state = State(joint=joint)
    found = node_costs(state.index, state.storages, model)
    return {n.name: c for n, c in zip(state.index.nodes, found, strict=True)}
