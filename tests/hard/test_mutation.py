"""Inputs and buffers that the step overwrites, wholly, in part, twice, in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from remat.graph.memory.storages import storage_key
from remat.graph.memory.writes import aliased_argument
from tests.hard.steps import Make, check, drawn, pair

T = torch.Tensor


def twice(x: T, w: T, b: T) -> T:
    h = torch.tanh(x @ w) * b.sin()
    b.mul_(2)
    h = h + b.cos() * h
    b.add_(1)
    return h.exp() * b.sin()


def in_part(x: T, w: T, b: T) -> T:
    h = torch.tanh(x @ w) * b.cos()
    b.view(-1)[2:6].add_(1)
    b.t()[0].zero_()
    b[:, 1:3] += 1
    return (h.exp() * b).sin()


def by_what_was_computed(x: T, w: T, b: T) -> T:
    h = torch.tanh(x @ w) * b.sin()
    b.copy_(h.detach())
    b[0] = h[0].detach()
    return (h * b.clone()).exp()


def and_returned(x: T, w: T, b: T) -> Any:
    h = torch.tanh(x @ w) * b.sin()
    b.mul_(2)
    return h, b, b[1:]


PROGRAMS: list[Callable[..., Any]] = [twice, in_part, by_what_was_computed, and_returned]


def with_buffer(f: Callable[..., Any]) -> Make:
    return lambda: (f, (*pair(), drawn(6, 8, grad=False)))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_of_an_input(program: Callable[..., Any]) -> None:
    least, *_ = check(with_buffer(program), captured=program is twice)
    assert least.saved_bytes == 6 * 8 * 4, "backward reads it, or what was made of it, as it was"


def test_under_inductor() -> None:
    # Inductor rewrites what it compiles anew; the plan must still be able to explain itself.
    with inductor_config.patch(fx_graph_cache=False):
        check(with_buffer(in_part), lower="inductor")


def test_of_inputs_that_share_memory() -> None:
    def f(x: T, w: T, one: T, other: T) -> T:
        h = torch.tanh(x @ w)
        r = h @ one.sin()
        one.add_(1)
        return r.exp() + (other.sum(0) * h).cos()

    def make(start: int) -> Any:
        base = drawn(16, 8, grad=False)
        return f, (*pair(), base[:8], base[start : start + 8])

    for start in (4, 8):
        check(lambda start=start: make(start))  # type: ignore[misc]


def test_of_an_input_that_is_differentiated() -> None:
    def f(x: T, w: T, y: T) -> T:
        h = torch.tanh(x @ w)
        y.add_(h.sum())
        return (h @ y).sin()

    check(lambda: (f, (*pair(), drawn(8, 8) * 2)))


class Counting(torch.autograd.Function):
    """Writes to a buffer in backward, and in forward too if asked."""

    @staticmethod
    def forward(ctx: Any, x: T, buf: T, also: bool) -> T:
        ctx.buf = buf
        ctx.save_for_backward(x)
        if also:
            buf.mul_(2)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: T) -> Any:
        (x,) = ctx.saved_tensors
        ctx.buf.add_(g.sum())
        return g * x.cos(), None, None


@pytest.mark.parametrize("also", [False, True])
def test_in_backward(also: bool) -> None:
    def f(x: T, w: T, b: T) -> T:
        return Counting.apply(torch.tanh(x @ w), b, also).exp()  # type: ignore[no-any-return, no-untyped-call]

    check(lambda: (f, (*pair(), drawn(3, grad=False))))


def test_views_of_a_snapshot_look_at_the_snapshot() -> None:
    def f(x: T, w: T, b: T) -> T:
        h = torch.tanh(x @ w) * b.t().sin().t() + torch.cos(x @ w) * b.t().cos().t()
        b.mul_(2)
        return h.exp()

    (plan,) = check(with_buffer(f), budgets=(0,))
    views = [n for n in plan.backward.graph.nodes if aliased_argument(n) is not None]
    seen = [n.args[0].name for n in views]
    assert "primals_3_snapshot" in seen
    for view in views:
        base = view.args[0]
        assert storage_key(view.meta["val"]) == storage_key(base.meta["val"]), view.name
