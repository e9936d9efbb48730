"""Sizes that are symbols: several at once, in views and arithmetic, read by backward alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from remat.units import Budget
from tests.hard.steps import Make, assert_same, check, compiled, drawn, pair, step

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

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
    least, *_ = check(marked(program))
    assert least.recomputed


def test_under_inductor() -> None:
    check(marked(view_of_a_product), budgets=(0,), lower="inductor", tolerance=1e-4)


def grows(x: T, mem: T, w: T) -> T:
    h = torch.cat([x, mem]) @ w
    a = (h @ h.mT).softmax(-1)
    return ((a @ h).sin() @ w)[: len(x)]


@pytest.mark.parametrize("ranges", [{}, {"min": 2, "max": 40}], ids=["marked", "range"])
@pytest.mark.parametrize("budget", [Budget(nbytes=10_000), remat.Peak(50_000)], ids=str)
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

    least, *_ = check(lambda: (f, (*pair(), drawn(6, 8, grad=False))), dynamic=True)
    assert least.snapshots


def test_only_sizes_are_handed_over_where_only_sizes_are_read() -> None:
    def f(x: T) -> T:
        return x.sum() / x.numel() + x.mean(0).sum()

    def make() -> Any:
        x = drawn(6, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        return f, (x,)

    for plan in check(make):
        handed = [n for n in plan.backward.graph.nodes if n.op == "placeholder"][:-1]
        assert handed
        assert all(isinstance(n.meta["val"], torch.SymInt) for n in handed)


@pytest.mark.parametrize("budget", [0, 1])
def test_one_plan_serves_all_sizes(budget: float) -> None:
    f = compiled(drops, budget=budget, how={"dynamic": True})
    before = len(remat.plans())
    for rows, columns in ((6, 10), (4, 12), (9, 5)):
        args = (drawn(rows, 8), drawn(8, columns))
        again = (drawn(rows, 8), drawn(8, columns))
        assert_same(step(f, args), step(drops, again))
    assert len(remat.plans()) - before == 1


def test_a_plan_of_a_captured_graph_fits() -> None:
    check(lambda: (drops, pair()), budgets=(0,), dynamic=True, captured=True)


def test_a_capture_has_the_sizes_that_are_marked() -> None:
    check(marked(view_of_a_product), budgets=(0,), captured=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
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
