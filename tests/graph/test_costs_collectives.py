"""Collectives under the roofline: time to send, where a rank sends slower than its memory gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from remat.graph.costs import DEVICES, Roofline

FUNCTIONS = torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("target", "given", "made", "sent"),
    [
        (FUNCTIONS.all_reduce.default, 1 << 20, 1 << 20, 8 << 20),  # float32, twice
        (FUNCTIONS.all_gather_into_tensor.default, 1 << 18, 1 << 20, 4 << 20),
        (FUNCTIONS.reduce_scatter_tensor.default, 1 << 20, 1 << 18, 4 << 20),
    ],
)
def test_a_collective_takes_the_time_to_send(
    target: torch._ops.OpOverload, given: int, made: int, sent: int
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(given, device="meta")
    node = graph.call_function(target, (x, 4, "0"))
    node.meta["val"] = torch.empty(made, device="meta")
    h100 = DEVICES["h100"]
    assert Roofline().cost(node) == math.ceil(sent / h100.ranks_tbps)
    waited = graph.call_function(FUNCTIONS.wait_tensor.default, (node,))
    waited.meta["val"] = node.meta["val"]
    assert Roofline().cost(waited) <= math.ceil(2 * 4 * made / h100.memory_tbps)
