"""Cost models: what running a node once costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import remat
from remat.errors import ProblemError
from remat.graph.costs import DEVICES, Device, Flops, Roofline, RooflineFused, Unit
from tests.graph.costs.pricing import call_of, costs, symbolic_product
from tests.graphs import node, traced

aten = torch.ops.aten


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


def test_views_elements_and_inputs_cost_nothing(joint: remat.JointGraph) -> None:
    for model in (Flops(), Unit(), Roofline()):
        found = costs(joint, model)
        free = {name for name, cost in found.items() if cost == 0}
        views = {n for n in found if n.startswith(("view", "transpose", "split", "getitem"))}
        assert views
        inputs = {n.name for n in joint.graph.nodes if n.op == "placeholder"}
        assert views | inputs <= free
        assert not free & {"addmm", "relu", "bmm", "convolution"}
    found = costs(joint, Unit())
    assert {found[n] for n in ("addmm", "relu", "bmm", "convolution")} == {1}


@pytest.mark.parametrize(
    ("device", "dtype", "n", "tflops", "tbps"),  # rates from the data sheets
    [
        ("h100", torch.float32, 512, 495, 3.35),
        ("h100", torch.bfloat16, 8192, 989, 3.35),
        ("a100", torch.float32, 4096, 156, 2.039),
        ("a100", torch.float64, 4096, 156 / 8, 2.039),
        ("mi300x", torch.float16, 64, 1307, 5.3),
    ],
)
def test_roofline_is_the_slower_of_arithmetic_and_memory(
    device: str, dtype: torch.dtype, n: int, tflops: float, tbps: float
) -> None:
    with torch.device("meta"):
        a, b = torch.empty(n, n, dtype=dtype), torch.empty(n, n, dtype=dtype)
    joint = traced(torch.mm, a, b)
    slower = max(2 * n**3 / tflops, 3 * n * n * dtype.itemsize / tbps)
    cost = costs(joint, Roofline(DEVICES[device]))["mm"]
    assert cost == pytest.approx(slower, rel=1e-9, abs=1)
    assert Roofline.unit == "ps"


@pytest.mark.parametrize(
    ("factors", "result", "tflops"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, 2 * 989),
        (torch.bfloat16, torch.float32, 989),
    ],
)
def test_the_factors_of_a_product_set_its_rate(
    factors: torch.dtype, result: torch.dtype, tflops: float
) -> None:
    """The result and the scales may be of wider types."""
    n = 8192
    x, out = (torch.empty(n, n, dtype=d, device="meta") for d in (factors, result))
    product = call_of(torch.ops.aten._scaled_mm.default, x, x, torch.ones(()), result=out)
    cost = Roofline(DEVICES["h100"]).cost(product)
    assert cost == pytest.approx(2 * n**3 / tflops, abs=1)


def test_roofline_by_name() -> None:
    assert str(Roofline.parse(None)) == "roofline:h100"
    assert str(Roofline.parse("b200")) == "roofline:b200"
    with pytest.raises(ProblemError, match=r"unknown device; known: a100, h100"):
        Roofline.parse("abacus")
    with pytest.raises(ProblemError, match="takes no argument"):
        Flops.parse("h100")


def test_flops_with_symbolic_sizes_use_hints() -> None:
    joint = symbolic_product()
    assert costs(joint, Flops())["mm"] == 2 * 6 * 5 * 7
    assert type(node(joint, "mm").meta["val"].shape[0]) is not int


#: A device that is slower than its memory at random numbers, tanh and max pooling.
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
    ("target", "args", "kwargs", "ps"),
    [
        (aten.tanh.default, (), {}, 100),
        (aten.gelu.default, (), {"approximate": "tanh"}, 100),
        (aten.gelu.default, (), {}, 0),
        (aten.native_dropout.default, (0.5, True), {}, 1_000),
        (aten.rand_like.default, (), {}, 1_000),
        (aten.exp.default, (), {}, 0),
    ],
)
def test_an_element_takes_its_time(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ps: int
) -> None:
    node = call_of(target, torch.empty(512, device="meta"), *args, **kwargs)
    for model in (Roofline(SLOW), RooflineFused(SLOW)):
        assert model.cost(node) == (512 * ps or model.moved_bytes(node))


@pytest.mark.parametrize(("window", "elements"), [([3, 3], 9), ([2], 4), ([2, 4], 8)])
def test_pooling_takes_the_time_of_its_windows(window: list[int], elements: int) -> None:
    images = torch.empty(2, 8, 32, 32, device="meta")
    node = call_of(aten.max_pool2d_with_indices.default, images, window, [2, 2])
    read = node.meta["val"][0].numel() * elements
    assert Roofline(SLOW).cost(node) == read * 100


@pytest.mark.parametrize(
    ("name", "read", "written", "sent"),
    [
        ("all_reduce", 1 << 20, 1 << 20, 8 << 20),  # float32, twice
        ("all_gather_into_tensor", 1 << 18, 1 << 20, 4 << 20),
        ("reduce_scatter_tensor", 1 << 20, 1 << 18, 4 << 20),
    ],
)
def test_a_collective_takes_the_time_to_send(name: str, read: int, written: int, sent: int) -> None:
    functions = torch.ops._c10d_functional
    given, made = (torch.empty(n, device="meta") for n in (read, written))
    node = call_of(getattr(functions, name).default, given, 4, "0", result=made)
    h100 = DEVICES["h100"]
    assert Roofline().cost(node) == math.ceil(sent / h100.ranks_tbps)
    waited = call_of(functions.wait_tensor.default, made, result=made)
    assert Roofline().cost(waited) <= math.ceil(2 * made.nbytes / h100.memory_tbps)
