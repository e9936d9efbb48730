"""Functions with a backward of their own, hooks, and backward more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import remat
from tests.hard.steps import check, drawn, pair

T = torch.Tensor


class Tanh(torch.autograd.Function):
    """Two outputs, three saved tensors, a constant."""

    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> Any:
        y = torch.tanh(x @ w)
        ctx.save_for_backward(x, w, y)
        ctx.factor = 2
        return y, y.exp()

    @staticmethod
    def backward(ctx: Any, g: T, g_exp: T) -> Any:
        x, w, y = ctx.saved_tensors
        t = (g + g_exp * y.exp()) * (1 - y * y)
        return t @ w.t() * ctx.factor, x.t() @ t


class Masked(torch.autograd.Function):
    """Draws in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: T) -> T:
        (mask,) = ctx.saved_tensors
        return g * mask * torch.rand_like(g)


class Largest(torch.autograd.Function):
    """One output that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: T) -> Any:
        i = x.argmax(1)
        ctx.mark_non_differentiable(i)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(i)
        return x.sin(), i

    @staticmethod
    def backward(ctx: Any, g: T, _: Any) -> T:
        (i,) = ctx.saved_tensors
        return g * i.unsqueeze(1)


class Updating(torch.autograd.Function):
    """Saves a copy of a buffer, and updates the buffer in place without saying so."""

    @staticmethod
    def forward(ctx: Any, x: T, b: T) -> T:
        ctx.save_for_backward(x, b.clone())
        b.add_(x.detach().mean(0))
        return x + 1

    @staticmethod
    def backward(ctx: Any, g: T) -> Any:
        x, before = ctx.saved_tensors
        return g * before.cos() * x, None


def two_outputs(x: T, w: T) -> T:
    y, e = Tanh.apply(x.cos(), w)  # type: ignore[no-untyped-call]
    return (y.sin() * e).exp()  # type: ignore[no-any-return]


def random(x: T, w: T) -> T:
    return Masked.apply(torch.tanh(x @ w)).sin().exp()  # type: ignore[no-any-return, no-untyped-call]


def undifferentiable(x: T, w: T) -> Any:
    y, i = Largest.apply(torch.tanh(x @ w))  # type: ignore[no-untyped-call]
    return y.exp(), i


def hooked(x: T, w: T) -> T:
    h = torch.tanh(x @ w)
    h.register_hook(lambda g: g * 2)  # type: ignore[no-untyped-call]
    w.register_hook(lambda g: g * 3)  # type: ignore[no-untyped-call]
    return h.exp()


@pytest.mark.parametrize(
    "program", [two_outputs, random, undifferentiable, hooked], ids=lambda f: f.__name__
)
def test_every_budget(program: Callable[..., Any]) -> None:
    least, *_ = check(lambda: (program, pair()), captured=program is random)
    assert least.recomputed


def test_under_inductor() -> None:
    check(lambda: (random, pair()), lower="inductor")


@pytest.mark.parametrize(
    ("lower", "times", "budgets"),
    [
        ("eager", 1, (0, remat.Peak(0.5))),
        ("eager", 2, (remat.Peak(0.0), 1)),
        ("inductor", 2, (remat.Peak(0.0),)),
    ],
    ids=["once", "twice", "inductor"],
)
def test_a_buffer_is_saved_and_then_updated_unmarked(
    lower: str, times: int, budgets: tuple[float | remat.Peak, ...]
) -> None:
    def f(x: T, w: T, b: T) -> T:
        h = torch.tanh(x @ w)
        for _ in range(times):
            h = Updating.apply(h @ w, b).sin()  # type: ignore[no-untyped-call]
        return h

    check(lambda: (f, (*pair(), drawn(6, 8, grad=False))), budgets=budgets, lower=lower)


def test_random_operators_of_all_kinds() -> None:
    def f(x: T, w: T) -> T:
        h = torch.nn.functional.rrelu(torch.tanh(x @ w), training=True)
        h = h * torch.bernoulli(torch.full((6, 8), 0.5)) + torch.rand_like(h)
        h = h + torch.randperm(6)[:, None] + torch.randint(0, 4, (6, 1)) + torch.randn(8)
        picked = torch.multinomial(torch.ones(6, 8), 8).float()
        noisy = torch.nn.functional.gumbel_softmax(h)
        return (noisy * picked * x).exp()

    check(lambda: (f, pair()))


def test_attention_that_drops() -> None:
    def f(q: T, k: T) -> T:
        return torch.nn.functional.scaled_dot_product_attention(
            q.sin(), k.cos(), k, dropout_p=0.3, is_causal=True
        ).exp()

    check(lambda: (f, (drawn(2, 2, 6, 8), drawn(2, 2, 6, 8).mul(2).detach().requires_grad_())))
