"""Cost models: what running a node once costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import remat
from remat.errors import ProblemError
from remat.graph.costs import DEVICES, CostModel, Flops, Roofline, Unit, node_costs
from remat.passes.core.state import State
from tests.graphs import joint_of, node, traced, weight


def costs(joint: remat.JointGraph, model: CostModel) -> dict[str, int]:
    state = State(joint=joint)
    found = node_costs(state.index, state.storages, model)
    return {n.name: c for n, c in zip(state.index.nodes, found, strict=True)}


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
        h = torch.addmm(c, a, b).relu()
        left, right = h.view(2, 4, 32).transpose(1, 2).split(16, 1)
        return torch.bmm(d, left), right, F.conv2d(h.view(1, 1, 8, 32), h.view(1, 1, 8, 32))

    return traced(
        f, torch.randn(8, 16), torch.randn(16, 32), torch.randn(32), torch.randn(2, 5, 16)
    )


def test_flops_are_exact(joint: remat.JointGraph) -> None:
    found = costs(joint, Flops())
    assert found["addmm"] == 2 * 8 * 16 * 32
    assert found["bmm"] == 2 * 2 * 5 * 16 * 4
    assert found["convolution"] == 2 * 8 * 32
    assert found["relu"] == 1, "what is not counted costs 1, so that recomputing is never free"
    assert Flops.unit == "FLOP"


def test_products_of_a_backward_are_counted() -> None:
    joint = joint_of(lambda x, w: torch.mm(x, w).sum(), weight(3, 5), weight(5, 7))
    products = [c for c in costs(joint, Flops()).values() if c > 1]
    assert products == [2 * 3 * 5 * 7] * 3


def test_views_elements_and_inputs_cost_nothing(joint: remat.JointGraph) -> None:
    for model in (Flops(), Unit(), Roofline()):
        found = costs(joint, model)
        free = {name for name, cost in found.items() if cost == 0}
        views = {n for n in found if n.startswith(("view", "transpose", "split", "getitem"))}
        assert views
        inputs = {n.name for n in joint.graph.nodes if n.op == "placeholder"}
        assert views | inputs <= free
        assert not free & {"addmm", "relu", "bmm", "convolution"}


def test_unit_counts_operators(joint: remat.JointGraph) -> None:
    found = costs(joint, Unit())
    assert {found[n] for n in ("addmm", "relu", "bmm", "convolution")} == {1}


@pytest.mark.parametrize(
    ("device", "dtype", "n"),
    [
        ("h100", torch.float32, 512),
        ("h100", torch.bfloat16, 8192),
        ("a100", torch.float32, 4096),
        ("mi300x", torch.float16, 64),
    ],
)
def test_roofline_is_the_slower_of_arithmetic_and_memory(
    device: str, dtype: torch.dtype, n: int
) -> None:
    with torch.device("meta"):
        a, b = torch.empty(n, n, dtype=dtype), torch.empty(n, n, dtype=dtype)
    joint = traced(torch.mm, a, b)
    # TFLOP/s, TB/s: from the data sheets.
    rates = {
        "a100": (312, 156, 2.039),
        "h100": (989, 495, 3.35),
        "h200": (989, 495, 4.8),
        "gh200": (989, 495, 4.0),
        "b200": (2250, 1125, 8.0),
        "epyc": (0.39, 0.183, 0.0273),
        "mi300x": (1307, 654, 5.3),
    }
    half, single, bandwidth = rates[device]
    arithmetic_s = 2 * n**3 / ((single if dtype is torch.float32 else half) * 1e12)
    memory_s = 3 * n * n * dtype.itemsize / (bandwidth * 1e12)
    cost = costs(joint, Roofline(DEVICES[device]))["mm"]
    assert cost == pytest.approx(max(arithmetic_s, memory_s) * 1e12, rel=1e-9, abs=1)
    assert Roofline.unit == "ps"
    assert set(rates) == set(DEVICES)


def test_roofline_by_name() -> None:
    assert str(Roofline.parse(None)) == "roofline:h100"
    assert str(Roofline.parse("b200")) == "roofline:b200"
    with pytest.raises(ProblemError, match=r"unknown device; known: a100, h100"):
        Roofline.parse("abacus")
    with pytest.raises(ProblemError, match="takes no argument"):
        Flops.parse("h100")


@pytest.mark.parametrize("answer", [math.nan, math.inf, -1, True, "7", None])
def test_a_cost_model_is_not_believed(joint: remat.JointGraph, answer: Any) -> None:
    class Liar(CostModel):
        name = "liar"
        unit = "op"

        def cost(self, node: fx.Node) -> int:
            return answer

    with pytest.raises(ProblemError, match=r"cost model 'liar' says that 'addmm'"):
        costs(joint, Liar())


def test_identical_calls_are_asked_for_once() -> None:
    asked: list[str] = []

    class Counting(CostModel):
        name = "counting"
        unit = "op"

        def cost(self, node: fx.Node) -> int:
            asked.append(node.name)
            return 3

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.mm(x, w)
        return x[:2] @ w

    joint = traced(f, torch.randn(4, 4), torch.randn(4, 4))
    found = costs(joint, Counting())
    assert asked == ["mm", "mm_4"]
    assert [found[f"mm{k}"] for k in ("", "_1", "_2", "_3", "_4")] == [3] * 5


def test_flops_with_symbolic_sizes_use_hints() -> None:
    joint = joint_of(
        lambda x, w: torch.mm(x, w).sum(), torch.randn(6, 5), weight(5, 7), dynamic=True
    )
    found = costs(joint, Flops())
    assert found["mm"] == 2 * 6 * 5 * 7
    assert type(node(joint, "mm").meta["val"].shape[0]) is not int
