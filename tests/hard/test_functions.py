"""Functions with a backward of their own, hooks, and backward more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import remat
from tests.fuzz.functions import Gated, NoisyBackward, Scaled, Updating
from tests.hard.steps import check, drawn, pair

T = torch.Tensor


def scaled(x: T, w: T) -> T:
    return Scaled.apply(x.cos() @ w, 2.0).sin().exp()  # type: ignore[no-any-return, no-untyped-call]


def gated(x: T, w: T) -> Any:
    h = torch.tanh(x @ w)
    y, is_open = Gated.apply(h, h.cos())  # type: ignore[no-untyped-call]
    return y.exp(), is_open


def random(x: T, w: T) -> T:
    """Draws in forward and in backward."""
    h = NoisyBackward.apply(torch.tanh(x @ w))  # type: ignore[no-untyped-call]
    return F.dropout(h, 0.5).sin().exp()


def hooked(x: T, w: T) -> T:
    h = torch.tanh(x @ w)
    h.register_hook(lambda g: g * 2)  # type: ignore[no-untyped-call]
    w.register_hook(lambda g: g * 3)  # type: ignore[no-untyped-call]
    return h.exp()


@pytest.mark.parametrize("program", [scaled, gated, random, hooked], ids=lambda f: f.__name__)
def test_every_budget(program: Callable[..., Any]) -> None:
    least, *_ = check(lambda: (program, pair()), captured=program is random)
    assert least.recomputed


def test_under_inductor() -> None:
    check(lambda: (random, pair()), lower="inductor", captured=True)


@pytest.mark.parametrize(
    ("lower", "budgets"), [("eager", (remat.Peak(0.0), 1)), ("inductor", (remat.Peak(0.0),))]
)
def test_a_buffer_is_saved_and_then_updated_unmarked(
    lower: str, budgets: tuple[float | remat.Peak, ...]
) -> None:
    def f(x: T, w: T, b: T) -> T:
        h = torch.tanh(x @ w)
        for _ in range(2):
            h = Updating.apply(h @ w, b).sin()  # type: ignore[no-untyped-call]
        return h

    check(lambda: (f, (*pair(), drawn(6, 8, grad=False))), budgets=budgets, lower=lower)


def test_random_operators_of_all_kinds() -> None:
    def f(x: T, w: T) -> T:
        h = F.rrelu(torch.tanh(x @ w), training=True)
        h = h * torch.bernoulli(torch.full((6, 8), 0.5)) + torch.rand_like(h)
        h = h + torch.randperm(6)[:, None] + torch.randint(0, 4, (6, 1)) + torch.randn(8)
        picked = torch.multinomial(torch.ones(6, 8), 8).float()
        noisy = F.gumbel_softmax(h)
        return (noisy * picked * x).exp()

    check(lambda: (f, pair()))


def test_attention_that_drops() -> None:
    def f(q: T, k: T) -> T:
        return F.scaled_dot_product_attention(
            q.sin(), k.cos(), k, dropout_p=0.3, is_causal=True
        ).exp()

    check(lambda: (f, (drawn(2, 2, 6, 8), drawn(2, 2, 6, 8).mul(2).detach().requires_grad_())))
