"""The fused roofline: what stays in registers is not paid for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

import remat
from remat.graph.costs import DEVICES, Roofline, RooflineFused
from tests.graph.costs.pricing import costs
from tests.graphs import calls, joint_of, traced, weight

N = 64
SQUARE = N * N * 4


def fused(joint: remat.JointGraph) -> dict[str, int]:
    return costs(joint, RooflineFused())


def moving(nbytes: int) -> int:
    """What moving bytes takes on an H100."""
    return max(1, math.ceil(nbytes / DEVICES["h100"].memory_tbps))


def square() -> torch.Tensor:
    return torch.randn(N, N)


def test_a_chain_pays_at_its_ends_only() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin().cos().exp() @ w).relu().neg().sum(0)

    found = fused(traced(f, square(), square()))
    assert found["sin"] == moving(SQUARE), "reads the input"
    assert found["cos"] == 1
    assert found["exp"] == moving(SQUARE), "writes what the product reads"
    assert found["mm"] == moving(3 * SQUARE), "a product moves everything"
    assert found["relu"] == moving(SQUARE)
    assert found["neg"] == 1
    assert found["sum_1"] == moving(N * 4), "a reduction fuses with what it reads"


def test_fusion_sees_through_views() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        left, right = x.sin().t().split(N // 2)
        return left.cos(), right.exp(), w.neg().t() @ x

    found = fused(traced(f, square(), square()))
    assert found["sin"] == moving(SQUARE)
    assert found["cos"] == found["exp"] == moving(SQUARE // 2)
    assert found["neg"] == moving(2 * SQUARE), "a product reads a view of it"


def test_each_result_of_a_tuple_is_paid_for_by_who_reads_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x.sin(), dim=1)
        return (variance.rsqrt() * 2) + (w @ mean)

    found = fused(traced(f, square(), square()))
    assert found["var_mean"] == moving(N * 4)
    assert found["rsqrt"] == 1


def test_what_nobody_reads_is_written() -> None:
    joint = traced(lambda x: x.sin().cos(), square())
    sin, cos = (n for n in joint.graph.nodes if n.op == "call_function")
    assert RooflineFused().cost(sin) == moving(SQUARE)
    cos.replace_input_with(sin, sin.args[0])
    assert RooflineFused().cost(sin) == moving(2 * SQUARE)


def test_the_same_call_costs_what_its_place_makes_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ w).sin().sin()

    found = fused(traced(f, square(), square()))
    assert found["sin"] == moving(2 * SQUARE)
    assert found["sin_1"] == found["sin_2"] == moving(SQUARE)
    assert costs(traced(f, square(), square()), Roofline())["sin_1"] == moving(2 * SQUARE)


def test_what_writes_to_an_argument_does_not_fuse() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        h.add_(1)
        return h.cos()

    found = fused(traced(f, square()))
    assert found["sin"] == moving(2 * SQUARE)
    assert found["cos"] == moving(2 * SQUARE)


def test_attention_that_drops_is_a_kernel_of_its_own() -> None:
    def f(q: torch.Tensor) -> torch.Tensor:
        q = q.sin()
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)[0].cos()

    joint = traced(f, torch.randn(1, 2, N, 8))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert fused(joint)[name] == costs(joint, Roofline())[name]
    assert fused(joint)["cos"] == moving(2 * 2 * N * 8 * 4)


def test_nothing_fuses_across_devices() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().to("meta").cos()

    found = fused(traced(f, square()))
    assert found["sin"] == moving(2 * SQUARE)
    assert found["cos"] == moving(SQUARE)


def test_no_cost_is_above_the_roofline() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(F.layer_norm(x @ w, (N,))), 0.1)
        return F.cross_entropy(F.softmax(h @ w, -1) + x, torch.zeros(N, dtype=torch.long))

    joint = joint_of(f, square(), weight(N, N))
    products = [n for n in calls(joint.graph) if n.startswith("mm")]
    assert products
    for device in DEVICES.values():
        cheap, plain = costs(joint, RooflineFused(device)), costs(joint, Roofline(device))
        assert all(cheap[n] <= plain[n] for n in plain)
        assert all((cheap[n] == 0) == (plain[n] == 0) for n in plain)
        assert sum(cheap.values()) < sum(plain.values())
        assert all(cheap[n] == plain[n] for n in products)
