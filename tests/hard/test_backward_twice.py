"""Backward that keeps the graph, for a second one: Inductor's code overwrites what was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

import remat

T = torch.Tensor


class Gated(nn.Module):
    """In its backward, a product takes the place of a saved value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: T) -> T:
        gate = torch.tanh(self.first(x))
        return torch.sin(self.second(gate) * gate) * gate


def net() -> nn.Module:
    torch.manual_seed(0)
    return Gated()


def trained(model: nn.Module, f: Callable[[T], T]) -> list[Any]:
    """Gradients of two losses of one forward, in steps that keep the graph and in steps that do not."""
    model.zero_grad()
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    for keep in (True, False, True):
        out = f(x)
        out.sum().backward(retain_graph=keep)
        if keep:
            out.square().sum().backward(retain_graph=True)
            out.cos().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("budget", "lower"), [(0, "eager"), (remat.Peak(0.0), "inductor")], ids=str
)
def test_gradients_of_two_losses_are_those_of_eager(budget: Any, lower: str) -> None:
    model = net()
    expected = trained(model, model)
    for _ in range(2 if lower == "inductor" else 1):  # the second time out of the cache
        torch.compiler.reset()
        f = torch.compile(model, backend="remat", options={"budget": budget, "lower": lower})
        torch.testing.assert_close(trained(model, f), expected, rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_overwritten_where_the_graph_is_not_kept() -> None:
    """Otherwise the tests above show nothing, and steps take more memory."""
    model = net()
    f = torch.compile(model, backend="remat", options={"budget": remat.Peak(0.0)})
    for keep in (True, False):
        out = f(torch.randn(32, 16))
        step: Any = out.grad_fn
        before = [(v, v.clone()) for v in step.saved_tensors]
        out.sum().backward(retain_graph=keep)
        assert all(torch.equal(a, b) for a, b in before) is keep
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_a_cached_backward_does_not_overwrite_what_it_may_no_longer() -> None:
    """The key of Inductor's own cache lacks what backward may overwrite."""

    def f(x: T, w: T) -> T:
        h = x @ w
        return ((h.sin() @ w).exp() + h.cos()).tanh().sum()

    def gradients(*, overwrite: bool) -> list[T]:
        torch.compiler.reset()
        x, w = (torch.linspace(-1, 1, 64).view(8, 8).requires_grad_() for _ in range(2))
        with functorch_config.patch(donated_buffer=overwrite):
            loss = torch.compile(f, backend="remat")(x, w)
            return [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]

    with fresh_cache():
        gradients(overwrite=True)
        torch.testing.assert_close(*gradients(overwrite=False))
