"""Outputs that share memory with inputs, with one another, with what backward reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import remat
from tests.hard.steps import check, pair

T = torch.Tensor


def of_inputs(x: T, w: T) -> Any:
    return torch.tanh(x @ w).exp(), x, x.view(-1), w.t()


def of_one_another(x: T, w: T) -> Any:
    h = torch.tanh(x @ w).exp()
    return h, h, h.view(-1), h[1:], h.t().sin(), h.detach()


def of_what_is_saved(x: T, w: T) -> Any:
    h = x @ w
    a = torch.tanh(h)
    e = a.exp()
    return e.sin(), h, a, e


def of_views_alone(x: T, w: T) -> Any:
    h = torch.tanh(x @ w)
    return h.view(2, 3, 8).transpose(0, 1), h.unsqueeze(0).expand(2, 6, 8).sin(), h.unbind(0)[1]


def of_lists_of_views(x: T, w: T) -> Any:
    return *(x @ w).sin().chunk(3), *x.split(2)


def of_windows(x: T, w: T) -> Any:
    """Elements of the first and the last output share memory; PyTorch by itself gets their gradients wrong."""
    h = torch.tanh(x @ w)
    return h.unfold(0, 2, 1), h.exp().unfold(1, 3, 2), h.sin().as_strided((3, 4), (1, 2))


def constants(x: T, w: T) -> Any:
    return (x @ w).sin().exp(), torch.ones(3), 5, None, "text"


PROGRAMS: list[Callable[..., Any]] = [
    of_inputs,
    of_one_another,
    of_what_is_saved,
    of_views_alone,
    of_lists_of_views,
    constants,
    of_windows,
]


def test_saved_plans_fit_steps_with_windows() -> None:
    program, inputs = of_windows, pair()
    plan = remat.plan(remat.capture(program, inputs, lower="eager"), 0.5)
    torch._dynamo.reset()
    step = torch.compile(program, backend="remat", options={"lower": "eager", "plan": plan})
    step(*inputs)
    assert remat.plans()[-1].saved == plan.saved


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_outputs(program: Callable[..., Any]) -> None:
    for plan in check(lambda: (program, pair()), captured=program is of_inputs):
        if program is of_what_is_saved:
            assert plan.saved_bytes == 0, "outputs are alive anyway"


@pytest.mark.parametrize("program", [of_one_another, of_windows], ids=lambda f: f.__name__)
def test_under_inductor(program: Callable[..., Any]) -> None:
    check(lambda: (program, pair()), lower="inductor")
