"""Sizes that only the numbers tell: they are read from tensors, handed over or read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.hard.steps import check, drawn

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

T = torch.Tensor


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


def repeated(x: T, w: T) -> T:
    counts = torch.tensor([2, 1, 0, 3, 1, 2])
    return torch.repeat_interleave((x @ w).sin(), counts, dim=0).exp().sin()


def unique(x: T, w: T) -> Any:
    found = torch.unique((x > 0).sum(1))
    return (x @ w).exp().sum() * found.float().sin().sum(), found


@pytest.mark.parametrize(
    "program", [nonzero, masked, dropped, repeated, unique], ids=lambda f: f.__name__
)
def test_lengths_that_depend_on_numbers(program: Callable[..., Any]) -> None:
    least, *_ = check(lambda: (program, (drawn(6, 8), drawn(8, 8))))
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


def split(x: T, n: T) -> T:
    a = n.item()
    torch._check(a >= 0)
    torch._check(a <= 6)
    u, v = x.exp().split([a, 6 - a])
    return u.sin().sum(0) + v.cos().sum(0)


def left_over(x: T, n: T) -> T:
    """What is left behind the first rows: fewer than none by the number that stands in for theirs."""
    k = int((n % (x.shape[0] + 1)).item())
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    u, v = x.exp().split([k, x.shape[0] - k])
    return u.sin().sum(0) + (v.sin() @ v.mT).exp().sum()


@pytest.mark.parametrize(
    "program", [sliced, allocated, scaled, split, left_over], ids=lambda f: f.__name__
)
def test_sizes_from_an_item(program: Callable[..., Any]) -> None:
    check(lambda: (program, (drawn(6, 8), torch.tensor(4))))


def test_under_inductor() -> None:
    make = lambda: (nonzero, (drawn(6, 8), drawn(8, 8)))  # noqa: E731
    check(make, budgets=(0,), lower="inductor", tolerance=1e-4)


def test_a_plan_of_a_captured_graph_fits() -> None:
    check(lambda: (nonzero, (drawn(6, 8), drawn(8, 8))), budgets=(0,), captured=True)
