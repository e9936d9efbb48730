"""Kinds of tensors: complex, empty, sparse, and subclasses that AOTAutograd takes apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import remat
from tests.hard.steps import check, compiled, drawn

T = torch.Tensor


def complex_pair() -> tuple[T, T]:
    return tuple(  # type: ignore[return-value]
        (drawn(*shape, grad=False, dtype=torch.complex64) / 4).requires_grad_()
        for shape in ((6, 8), (8, 8))
    )


def products(x: T, w: T) -> T:
    return (x @ w).tanh().abs().sin() + torch.view_as_real(x.conj() * x).sum(-1)


def complex_output(x: T, w: T) -> T:
    return (x @ w).conj().tanh()


def transformed(x: T, w: T) -> T:
    return torch.fft.irfft(torch.fft.rfft((x @ w).real) * x[:, :5]).sin().exp()


@pytest.mark.parametrize(
    "program", [products, complex_output, transformed], ids=lambda f: f.__name__
)
def test_complex(program: Callable[..., Any]) -> None:
    check(lambda: (program, complex_pair()))


def test_nothing_in_them() -> None:
    def f(x: T, w: T) -> T:
        return torch.tanh(x @ w).exp().sum() + w.sum()

    check(lambda: (f, (drawn(0, 8), drawn(8, 8))))


def test_a_gradient_that_is_sparse() -> None:
    def f(table: T, rows: T) -> T:
        return torch.nn.functional.embedding(rows, table, sparse=True).sin().exp()

    def dense(make: Any) -> Any:
        program, (table, rows) = make()
        table.register_post_accumulate_grad_hook(lambda t: setattr(t, "grad", t.grad.to_dense()))
        return program, (table, rows)

    check(lambda: dense(lambda: (f, (drawn(10, 8), torch.tensor([1, 2, 3])))))


def two(*shape: int, grad: bool = True) -> T:
    first = drawn(*shape, grad=False)
    return TwoTensor(first, first.cos()).requires_grad_(grad)  # type: ignore[no-untyped-call, no-any-return]


def test_two_tensors_in_one() -> None:
    def f(x: T, w: T) -> T:
        return torch.tanh(x @ w).exp().sin()

    least, *_ = check(lambda: (f, (two(6, 8), drawn(8, 8))))
    assert sum(n.startswith("mm") for n in least.recomputed) == 2, "one product for each"


def test_one_that_is_mutated_dropped_and_viewed() -> None:
    def f(x: T, w: T, b: T) -> Any:
        h = torch.tanh(x @ w) * b.sin()
        b.mul_(2)
        return h.exp(), b.view(-1), F.dropout(h, 0.5)

    check(lambda: (f, (two(6, 8), drawn(8, 8), two(6, 8, grad=False))))


def test_ragged_ones() -> None:
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
    for mine, theirs in zip(run(compiled(program, budget=0)), run(program), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(remat.plans()) - before == 1


@pytest.mark.usefixtures("group")
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
