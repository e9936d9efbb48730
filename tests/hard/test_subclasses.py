"""Tensor subclasses: AOTAutograd takes them apart, we plan what is inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import remat
from tests.hard.steps import BUDGETS, check, compiled, drawn

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

T = torch.Tensor


def two(*shape: int, grad: bool = True) -> T:
    first = drawn(*shape, grad=False)
    return TwoTensor(first, first.cos()).requires_grad_(grad)  # type: ignore[no-untyped-call, no-any-return]


def test_two_tensors_in_one() -> None:
    def f(x: T, w: T) -> T:
        return torch.tanh(x @ w).exp().sin()

    least, *_ = check(lambda: (f, (two(6, 8), drawn(8, 8))), captured=False)
    assert sum(n.startswith("mm") for n in least.recomputed) == 2, "one product for each"


def test_one_that_is_mutated_dropped_and_viewed() -> None:
    def f(x: T, w: T, b: T) -> Any:
        h = torch.tanh(x @ w) * b.sin()
        b.mul_(2)
        return h.exp(), b.view(-1), F.dropout(h, 0.5)

    check(lambda: (f, (two(6, 8), drawn(8, 8), two(6, 8, grad=False))))


@pytest.mark.parametrize("budget", BUDGETS)
def test_ragged_ones(budget: float) -> None:
    """Their symbolic lengths are told apart by number from run to run, so values are compared."""

    def run(f: Any) -> list[T]:
        x = torch.nested.nested_tensor(
            [drawn(3, 8, grad=False), drawn(5, 8, grad=False)], layout=torch.jagged
        ).requires_grad_()
        w = drawn(8, 8)
        out = f(x, w)
        out.sin().sum().backward()
        return [out.detach(), x.grad.values(), w.grad]  # type: ignore[union-attr, list-item]

    def program(x: T, w: T) -> T:
        return torch.tanh(x @ w).exp().values()

    before = len(remat.plans())
    for mine, theirs in zip(run(compiled(program, budget=budget)), run(program), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(remat.plans()) - before == 1


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_distributed_ones() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    def make() -> Any:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(drawn(6, 8, grad=False), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(drawn(8, 8, grad=False), mesh, [Replicate()]).requires_grad_()

        def f(x: Any, w: Any) -> T:
            y = torch.tanh(x @ w).exp().redistribute(mesh, [Replicate()])
            return y.sin().to_local()  # type: ignore[no-any-return]

        return f, (x, w)

    check(make)
