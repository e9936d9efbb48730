"""What tells one call from another, and what running one by itself sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from remat.graph.costs import measure
from remat.graph.costs.request import request_of
from tests.graph.costs.pricing import call_of
from tests.graphs import traced


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 2,
        lambda x: x + 1.0,
        lambda x: x + x,
        lambda x: x + torch.randn(4, 6),
        lambda x: x.t() + 1,
        lambda x: x[:2] + 1,
        lambda x: x.double() + 1,
        lambda x: torch.add(x, 1, alpha=2),
    ],
)
def test_what_differs_is_told_apart(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def keys(f: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
        joint = traced(f, torch.randn(4, 6))
        return [request_of(n).key for n in joint.graph.nodes if "add" in n.name]

    (mine,), (theirs,) = keys(lambda x: x + 1), keys(other)
    assert mine != theirs
    assert keys(other) == [theirs], "and the same call is the same in every trace"


def test_every_rank_asks_for_the_same_call() -> None:
    def key(device: str) -> str:
        with FakeTensorMode():
            value = torch.empty(4, device=device)
        kwargs = {"device": torch.device(device)}
        return request_of(
            call_of(torch.ops.aten.ones_like.default, value, result=value, **kwargs)
        ).key

    assert key("cuda:0") == key("cuda:1")
    assert key("cuda:0") != key("cpu")


def test_what_runs_undisturbed_is_real() -> None:
    cpu = torch.device("cpu")
    with FakeTensorMode(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        with measure.undisturbed(cpu):
            made = torch.ones(2, 2)
            product = made @ made
            grad = torch.is_grad_enabled()
        assert torch.ones(2, 2).device.type == "meta", "and what surrounds it is back"
    assert type(made) is torch.Tensor
    assert (made.device, product.dtype, grad) == (cpu, torch.float32, False)
    assert product.tolist() == [[2, 2], [2, 2]]


def test_sizes_that_nothing_is_known_about_count_4096() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.nonzero(x).sin()

    module = make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.ones(3))
    sin = next(n for n in module.graph.nodes if n.name == "sin")
    assert "int64[4096, 1]" in request_of(sin).key


def test_runs_that_were_interrupted_do_not_count() -> None:
    assert measure.undisturbed_ps([500, 10, 12, 800, 21, 20]) == [10, 12, 20]
    ran: list[int] = []
    times = measure.durations_ps(lambda: ran.append(1), torch.device("cpu"), seconds=0.0, most=5)
    assert 4 <= len(ran) <= 6, "one to warm up, three to five that count"
    assert 1 <= len(times) < len(ran)
    assert all(t >= 0 for t in times)
