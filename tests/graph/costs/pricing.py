"""Costs of the nodes of small graphs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import remat
from remat.graph.costs import CostModel, node_costs
from remat.passes.core.state import State
from tests.graphs import joint_of, weight


def costs(joint: remat.JointGraph, model: CostModel) -> dict[str, int]:
    """What each node costs under a model, by name."""
    state = State(joint=joint)
    found = node_costs(state.index, state.storages, model)
    return {n.name: c for n, c in zip(state.index.nodes, found, strict=True)}


def call_of(target: Any, *args: Any, result: Any = None, **kwargs: Any) -> fx.Node:
    """A call by itself, whose tensors are placeholders; it runs once for its result, unless that is given."""
    graph = fx.Graph()

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tree_map(argument, args), kwargs)
    node.meta["val"] = target(*args, **kwargs) if result is None else result
    return node


@functools.cache
def products() -> remat.JointGraph:
    """Three products of which the sine is taken."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.sin(x @ w)
        return x.sum()

    return joint_of(f, torch.randn(8, 8), weight(8, 8))


def symbolic_product() -> remat.JointGraph:
    """A product of a 6 by 5 and a 5 by 7 matrix whose sizes are symbols."""
    traced = make_fx(torch.mm, tracing_mode="symbolic")(torch.ones(6, 5), torch.ones(5, 7))
    return remat.JointGraph(graph_module=traced, num_fwd_outputs=1)
