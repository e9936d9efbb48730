"""Kinds of numbers: complex, of lower precision, sparse, none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import remat
from tests.graphs import joint_of
from tests.hard.steps import assert_same, check, compiled, drawn, pair, step

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

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


def viewed(x: T, w: T) -> T:
    pairs = torch.view_as_real(x @ w).sin()
    return torch.view_as_real(torch.view_as_complex(pairs) * x.conj()).exp()


@pytest.mark.parametrize(
    "program", [products, complex_output, transformed, viewed], ids=lambda f: f.__name__
)
def test_complex(program: Callable[..., Any]) -> None:
    check(lambda: (program, complex_pair()))


def test_autocast() -> None:
    def f(x: T, w: T) -> T:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(x @ w).float().exp() @ w

    least, *_ = check(lambda: (f, pair()), tolerance=5e-2)
    assert "mm" in least.recomputed


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


def test_sparse_tensors_are_refused_by_pytorch() -> None:
    def f(x: T) -> T:
        return torch.sparse.mm(torch.eye(8).to_sparse(), x.sin()).exp()

    with pytest.raises(remat.RematError, match="does not support sparse Tensors"):
        joint_of(f, drawn(8, 8))
    with pytest.raises(Exception, match="does not support sparse Tensors"):
        compiled(f, budget=0)(drawn(8, 8))


def test_sparse_tensors_stay_outside_where_graph_breaks_are_allowed() -> None:
    def f(x: T, w: T) -> T:
        h = torch.tanh(x @ w).exp()
        return torch.sparse.mm(torch.eye(6).to_sparse(), h).sin()

    before = len(remat.plans())
    f_compiled = compiled(f, budget=0, how={"fullgraph": False})
    assert_same(step(f_compiled, pair()), step(f, pair()))
    assert len(remat.plans()) > before
