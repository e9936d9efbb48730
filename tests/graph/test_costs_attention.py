"""Operations of attention as a CPU runs it, for which PyTorch's registry has no formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import sdpa_backward_flop, sdpa_flop

import remat
from remat.graph import ops
from remat.graph.costs.counting import count_flops


@pytest.mark.parametrize("queries", [4, 8])
def test_attention_on_a_cpu_counts_what_a_gpu_would(queries: int) -> None:
    q, k, v = (
        torch.randn(2, queries, 48, 16, requires_grad=True),
        torch.randn(2, 4, 32, 16, requires_grad=True),
        torch.randn(2, 4, 32, 16, requires_grad=True),
    )

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
