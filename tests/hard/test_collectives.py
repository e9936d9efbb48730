"""Functional collectives: every rank must run them together, so none runs twice unless asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

import remat
from tests.graphs import joint_of
from tests.hard.steps import check, pair

T = torch.Tensor


pytestmark = pytest.mark.usefixtures("group")


def all_reduced(h: T) -> T:
    return functional.all_reduce(h, "sum", dist.group.WORLD)  # type: ignore[arg-type]


def all_gathered(h: T) -> T:
    return functional.all_gather_tensor_autograd(h, 0, dist.group.WORLD)  # type: ignore[arg-type]


def reduced_without_gradient(h: T) -> T:
    return h * functional.all_reduce(h.detach(), "sum", dist.group.WORLD)  # type: ignore[arg-type]


def reduced_in_place(h: T) -> T:
    total = h.detach().clone()
    dist.all_reduce(total)
    return h * total


COLLECTIVES: list[Callable[[T], T]] = [
    all_reduced,
    all_gathered,
    reduced_without_gradient,
    reduced_in_place,
]


def around(collective: Callable[[T], T]) -> Callable[[T, T], T]:
    def f(x: T, w: T) -> T:
        return collective(torch.tanh(x @ w)).exp().sin()

    return f


def communicates(name: str) -> bool:
    return name.startswith(("all_", "reduce_"))


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*autograd.*deprecated:FutureWarning")
def test_none_runs_twice(collective: Callable[[T], T]) -> None:
    for plan in check(lambda: (around(collective), pair()), captured=collective is all_reduced):
        assert not any(map(communicates, plan.recomputed))


def test_under_inductor() -> None:
    check(lambda: (around(reduced_without_gradient), pair()), lower="inductor")


@pytest.mark.parametrize("tagged", [False, True])
def test_one_runs_twice_if_the_user_asks_for_it(tagged: bool) -> None:
    def f(x: T, w: T) -> T:
        block = around(reduced_without_gradient)
        return checkpoint(block, x, w, use_reentrant=False) if tagged else block(x, w)  # type: ignore[no-any-return]

    plan = remat.plan(joint_of(f, *pair()), 0)
    assert any(map(communicates, plan.recomputed)) is tagged


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_one_without_a_reader_runs(lower: str) -> None:
    """Another rank may read its result, and would wait forever."""

    def f(x: T, w: T) -> T:
        h = x @ w
        all_reduced(h.detach())
        return h.exp().sin()

    for budget in (0, 1):
        plan = remat.plan(remat.capture(f, pair(), lower=lower), budget)
        assert any(communicates(node.name) for node in plan.forward.graph.nodes)
        assert not any(communicates(node.name) for node in plan.backward.graph.nodes)
