"""Sizes that are symbols: of inputs, several at once, or told by the numbers in tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from remat.units import Budget
from tests.hard.steps import Make, assert_same, check, compiled, drawn, pair, step

T = torch.Tensor


def view_of_a_product(x: T, w: T) -> T:
    h = torch.sin(x @ w).reshape(x.shape[0] * w.shape[1] // 2, 2)
    return h.cos().view(-1)[1:].cumsum(0) ** 2


def expanded(x: T, w: T) -> T:
    wide = (x @ w).exp().sum(1, keepdim=True).expand(x.shape[0], w.shape[1] * 2)
    return wide * torch.ones(w.shape[1] * 2) / x.shape[0]


def returns_sizes(x: T, w: T) -> Any:
    return torch.tanh(x @ w).exp(), x.shape[0] * 3, w.shape[1]


def drops(x: T, w: T) -> T:
    return F.dropout(torch.tanh(x @ w), 0.5).exp().sum(0) * x.shape[0]


def checkpointed(x: T, w: T) -> T:
    def block(a: T) -> T:
        return torch.tanh(a @ w).exp().view(-1, w.shape[1])

    return checkpoint(block, x, use_reentrant=False).sum(0)


def ranges(x: T, w: T) -> T:
    return (torch.arange(x.shape[0])[:, None] * (x @ w).sin()).tril().exp()


PROGRAMS: list[Callable[..., Any]] = [
    view_of_a_product,
    expanded,
    returns_sizes,
    drops,
    checkpointed,
    ranges,
]


def marked(f: Callable[..., Any]) -> Make:
    """The program with the rows of the one and the columns of the other matrix as symbols."""

    def make() -> Any:
        x, w = drawn(6, 8), drawn(8, 10)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(w, 1)
        return f, (x, w)

    return make


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_several_symbols(program: Callable[..., Any]) -> None:
    least, *_ = check(marked(program), captured=program is view_of_a_product)
    assert least.recomputed


def grows(x: T, mem: T, w: T) -> T:
    h = torch.cat([x, mem]) @ w
    a = (h @ h.mT).softmax(-1)
    return ((a @ h).sin() @ w)[: len(x)]


@pytest.mark.parametrize(
    ("budget", "ranges"),
    [(Budget(nbytes=10_000), {}), (remat.Peak(50_000), {"min": 2, "max": 40})],
    ids=["saved-marked", "peak-range"],
)
def test_budgets_in_bytes_leave_gradients_alone_at_all_sizes(
    budget: Any, ranges: dict[str, int]
) -> None:
    f = compiled(grows, budget=budget)
    for rows in (2, 8, 9, 40):
        args, again = ((drawn(rows, 8), drawn(8, 8), drawn(8, 8)) for _ in range(2))
        torch._dynamo.mark_dynamic(args[0], 0, **ranges)
        assert_same(step(f, args), step(grows, again))


def test_numbers_as_arguments() -> None:
    def f(x: T, n: int, a: float) -> T:
        return (x.sin() * a).exp()[:n] / (x.shape[0] + n) * a

    check(lambda: (f, (drawn(8, 4), 5, 2.5)), dynamic=True)


def test_an_input_that_is_mutated() -> None:
    def f(x: T, w: T, b: T) -> T:
        h = torch.tanh(x @ w) * b.sin()
        b.mul_(x.shape[0])
        return (h.exp() * b).sin()

    given = lambda: (f, (*pair(), drawn(6, 8, grad=False)))  # noqa: E731
    least, *_ = check(given, dynamic=True, captured=True)
    assert least.snapshots


def test_one_plan_serves_all_sizes() -> None:
    f = compiled(drops, budget=0, how={"dynamic": True})
    before = len(remat.plans())
    for rows, columns in ((6, 10), (4, 12), (9, 5)):
        args, again = ((drawn(rows, 8), drawn(8, columns)) for _ in range(2))
        assert_same(step(f, args), step(drops, again))
    assert len(remat.plans()) - before == 1


@pytest.mark.parametrize("run", [False, True])
def test_plans_of_several_graphs_with_marked_sizes_fit(run: bool) -> None:
    x, w = pair()
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)

    def f(x: T, w: T) -> T:
        h = (x @ w).sin().exp()
        torch._dynamo.graph_break()
        return (h @ w).cos().sum()

    expected = torch.autograd.grad(f(x, w), (x, w))
    plans = remat.plan(remat.capture(f, (x, w), lower="eager", fullgraph=False, run=run), 0)
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="remat", options={"plan": plans, "lower": "eager"})
    assert all(map(torch.equal, torch.autograd.grad(compiled(x, w), (x, w)), expected))


@pytest.fixture(autouse=True)
def _captured_from_numbers() -> Iterator[None]:
    from torch._dynamo import config

    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def nonzero(x: T, w: T) -> T:
    i = (x[:, 0] > 0).nonzero().squeeze(1)
    h = torch.tanh(x[i] @ w)
    return (h.exp() @ w.T).sin().sum(0)


def masked(x: T, w: T) -> T:
    h = torch.tanh(x @ w)
    kept = torch.masked_select(h, h > 0)
    return (kept.exp() / kept.shape[0]).sin().sum() + h.sum()


def dropped(x: T, w: T) -> T:
    return F.dropout((x @ w)[x > 0].exp(), 0.5).sin()


@pytest.mark.parametrize("program", [nonzero, masked, dropped], ids=lambda f: f.__name__)
def test_lengths_that_depend_on_numbers(program: Callable[..., Any]) -> None:
    least, *_ = check(lambda: (program, pair()), captured=program is nonzero)
    assert least.recomputed or program is dropped


def sliced(x: T, n: T) -> T:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return (x.sin().exp()[:k] * k).cos()


def allocated(x: T, n: T) -> T:
    k = n.item()
    torch._check(k >= 2)
    return (torch.ones(k, 8).sin() @ x.T.exp()).cos().sum(0)


def scaled(x: T, n: T) -> T:
    k = (n * 0.3).item()
    return (x.sin().exp() * k).cos() * k


def left_over(x: T, n: T) -> T:
    """What is left behind the first rows: fewer than none by the number that stands in for theirs."""
    k = int((n % (x.shape[0] + 1)).item())
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    u, v = x.exp().split([k, x.shape[0] - k])
    return u.sin().sum(0) + (v.sin() @ v.mT).exp().sum()


@pytest.mark.parametrize(
    "program", [sliced, allocated, scaled, left_over], ids=lambda f: f.__name__
)
def test_sizes_from_an_item(program: Callable[..., Any]) -> None:
    check(lambda: (program, (drawn(6, 8), torch.tensor(4))))


def test_under_inductor() -> None:
    check(lambda: (dropped, pair()), lower="inductor")
