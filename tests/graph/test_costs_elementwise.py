"""Operators that are slower than memory: random numbers, tanh and max pooling, where a device says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat
from remat.graph.costs import Device, Roofline, RooflineFused
from remat.graph.ops import is_random
from tests.graphs import joint_of

SLOW = Device(
    name="slow",
    half_tflops=1,
    single_tflops=1,
    memory_tbps=1,
    draws_tops=0.001,
    tanh_tops=0.01,
    pooled_tops=0.01,
)


@pytest.mark.parametrize(
    ("f", "target", "ps"),
    [
        (torch.tanh, "tanh", 100),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), "gelu", 100),
        (lambda x: nn.functional.gelu(x), "gelu", 0),
        (lambda x: nn.functional.dropout(x, 0.5), "native_dropout", 1_000),
        (lambda x: x * torch.rand_like(x), "rand", 1_000),
        (torch.exp, "exp", 0),
    ],
)
def test_an_element_takes_its_time(
    f: Callable[[torch.Tensor], torch.Tensor], target: str, ps: int
) -> None:
    joint = joint_of(f, torch.randn(512, requires_grad=True))
    nodes = [n for n in joint.graph.nodes if f".{target}" in str(n.target).replace("_like", "")]
    node = nodes[0]
    for model in (Roofline(SLOW), RooflineFused(SLOW)):
        assert model.cost(node) == (512 * ps or model.moved_bytes(node))


@pytest.mark.parametrize(("window", "elements"), [(3, 9), ((2, 4), 8)])
def test_pooling_takes_the_time_of_its_windows(
    window: int | tuple[int, int], elements: int
) -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(x, window, stride=2)

    joint = joint_of(pooled, torch.randn(2, 8, 32, 32, requires_grad=True))
    node = next(
        n for n in joint.graph.nodes if str(n.target).startswith("aten.max_pool2d_with_ind")
    )
    read = node.meta["val"][0].numel() * elements
    assert Roofline(SLOW).cost(node) == read * 100


def test_what_is_drawn_is_kept_where_drawing_it_again_is_dear() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x * torch.rand_like(x)).exp()
        return x

    joint = joint_of(f, torch.randn(64, 64, requires_grad=True))
    drawn = {n.name for n in joint.graph.nodes if is_random(n)}
    assert len(drawn) == 4
    plan = remat.plan(joint, 1.0, cost=RooflineFused(SLOW))
    assert plan.recomputed
    assert not drawn & {*plan.recomputed}
