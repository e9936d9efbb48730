"""What PyTorch's own tests expect of a partitioner, measured on real tensors.

Memory in units of one 128 by 128 float32 matrix (64 KiB), arithmetic in units of one product of two
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import remat
from tests.steps import Recorded, recording_backend, run_graphs

N = 128
MATRIX = 4 * N * N
PRODUCT = 2 * N**3
#: Each decides alone; PyTorch's expectations hold for all of them.
SOLVERS = ("auto", "cpsat", "dp")


class Measured(NamedTuple):
    """One step on a plan: matrices that forward really saved, and products that both graphs computed."""

    saved: float
    products: float


class Step:
    """One step of a program, captured with all that passes through it."""

    def __init__(self, f: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
        self.f, self.args, self.recorded = f, args, Recorded()
        backend = recording_backend(self.recorded, remat.partitioner(1))
        torch.compile(f, backend=backend, fullgraph=True)(*args).backward()

    def eager_products(self) -> float:
        return counted(lambda: self.f(*self.args).backward())

    def measure(self, budget: float, solver: str = "auto") -> Measured:
        kept, joint = -1, self.recorded.joint
        assert joint is not None
        plan = remat.plan(joint, budget, solver, cost="flops")

        def run() -> None:
            nonlocal kept
            given = self.recorded.inputs, self.recorded.tangents
            kept = run_graphs(joint, plan.forward, plan.backward, *given)[1]

        products = counted(run)
        assert plan.saved_bytes == kept, "the plan misstates what it saves"
        return Measured(saved=kept / MATRIX, products=products)


def counted(run: Callable[[], object]) -> float:
    """Products that something computes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / PRODUCT


def matrix(rows: int = 1, columns: int = 1) -> torch.Tensor:
    return torch.randn(rows * N, columns * N, requires_grad=True)


def chain(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
    x = x.cos()
    for w in ws:
        x = torch.mm(x, w).cos()
    return x.sum()


def test_products_are_recomputed_last() -> None:
    step = Step(chain, *(matrix() for _ in range(6)))
    eager = step.eager_products()
    others = ((k, s) for k in (2, 7) for s in SOLVERS[1:])
    for tenths, solver in (*((k, "auto") for k in range(11)), *others):
        measured = step.measure(tenths / 10, solver)
        recomputed = measured.products - eager
        if tenths <= 5:
            assert (measured.saved, recomputed) == (tenths, 5 - tenths)
        elif tenths < 10:
            assert measured.saved <= tenths
            assert recomputed == 0
        else:
            assert (measured.saved, recomputed) == (10, 0)


def two(x1: torch.Tensor, w1: torch.Tensor, x2: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return torch.mm(x1, w1).cos().sum() + torch.mm(x2, w2).cos().sum()


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_cheaper_of_two_products_is_recomputed(solver: str) -> None:
    step = Step(two, matrix(1, 1), matrix(1, 4), matrix(2, 2), matrix(2, 2))
    everything, half = (step.measure(budget, solver) for budget in (1, 0.5))
    eager = step.eager_products()
    assert (everything.saved, everything.products) == (8, eager)
    assert (half.saved, half.products) == (4, eager + 4)
