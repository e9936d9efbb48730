"""Operations of grouped products, and of attention on a CPU, for which PyTorch's registry has no formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import sdpa_backward_flop, sdpa_flop

import remat
from remat.graph import ops
from remat.graph.costs import Flops
from remat.graph.costs.counting import count_flops
from tests.graph.costs.pricing import call_of
from tests.graphs import weight


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
    shapes = (a, b, out)
    x, y, result = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    node = call_of(torch.ops.aten._grouped_mm.default, x, y, offsets, result=result)
    assert Flops().cost(node) == operations


@pytest.mark.parametrize("queries", [4, 8])
def test_attention_on_a_cpu_counts_what_a_gpu_would(queries: int) -> None:
    q, k, v = weight(2, queries, 48, 16), weight(2, 4, 32, 16), weight(2, 4, 32, 16)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=queries != 4).sum()

    aten = torch.ops.aten
    joint = remat.capture(step, (q, k, v))
    found = {ops.packet(n.target): count_flops(n) for n in joint.graph.nodes}
    shapes = [(2, queries, *x.shape[2:]) for x in (q, q, k, v)]
    assert found[aten._scaled_dot_product_flash_attention_for_cpu] == sdpa_flop(*shapes[1:])
    assert found[aten._scaled_dot_product_flash_attention_for_cpu_backward] == sdpa_backward_flop(
        *shapes
    )
