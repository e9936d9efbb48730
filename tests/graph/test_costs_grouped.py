"""Operations of grouped products, for which PyTorch's registry has no formula."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from remat.graph.costs import Flops


@pytest.mark.parametrize(
    ("a", "b", "out", "operations"),
    [
        ((96, 64), (4, 64, 32), (96, 32), 2 * 96 * 64 * 32),  # rows are split
        ((4, 96, 64), (64, 32), (96, 32), 2 * 96 * 64 * 32),  # columns are split
        ((96, 64), (64, 32), (4, 96, 32), 2 * 96 * 64 * 32),  # the sum is split
        ((4, 96, 64), (4, 64, 32), (4, 96, 32), 4 * 2 * 96 * 64 * 32),  # nothing is
    ],
)
def test_a_grouped_product_counts_each_row_once(
    a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...], operations: int
) -> None:
    graph = fx.Graph()
    inputs = []
    for name, shape in (("a", a), ("b", b)):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        inputs.append(node)
    offsets = graph.placeholder("offsets")
    offsets.meta["val"] = torch.empty(4, dtype=torch.int32, device="meta")
    node = graph.call_function(torch.ops.aten._grouped_mm.default, (*inputs, offsets))
    node.meta["val"] = torch.empty(out, dtype=torch.bfloat16, device="meta")
    assert Flops().cost(node) == operations
