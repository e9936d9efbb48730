"""What PyTorch's own tests expect of a partitioner, measured on real tensors.

Memory in units of one 128 by 128 float32 matrix (64 KiB), arithmetic in units of one product of two
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import remat
from tests.steps import Recorded, recording_backend

N = 128
MATRIX = 4 * N * N
PRODUCT = 2 * N**3
#: Each decides alone; PyTorch's expectations hold for all of them.
SOLVERS = ("auto", "cpsat", "dp")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One compiled step.

    Attributes:
        saved: bytes that forward really returned to backward, in matrices.
        products: products that backward really computed, in units of one.
        plan: what it ran on.
    """

    saved: float
    products: float
    plan: remat.Plan


def measure(
    f: Callable[..., torch.Tensor], *args: Any, budget: float, solver: str = "auto"
) -> Measured:
    recorded = Recorded()
    partition = remat.partitioner(budget, solver, cost="flops")
    compiled = torch.compile(f, backend=recording_backend(recorded, partition), fullgraph=True)
    out = compiled(*args)
    with FlopCounterMode(display=False) as counter:
        out.backward()
    plan = remat.plans()[-1]
    assert plan.saved_bytes == recorded.saved_bytes, "the plan misstates what it saves"
    return Measured(
        saved=recorded.saved_bytes / MATRIX,
        products=counter.get_total_flops() / PRODUCT,
        plan=plan,
    )


def matrix(rows: int = 1, columns: int = 1) -> torch.Tensor:
    return torch.randn(rows * N, columns * N, requires_grad=True)


def eager_products(f: Callable[..., torch.Tensor], *args: Any) -> float:
    out = f(*args)
    with FlopCounterMode(display=False) as counter:
        out.backward()
    return counter.get_total_flops() / PRODUCT


def cheap(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.cos(), w).sum()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("budget", "saved"), [(1, 1.0), (0.5, 0.0)])
def test_what_is_cheap_is_recomputed(budget: float, saved: float, solver: str) -> None:
    args = matrix(), matrix()
    measured = measure(cheap, *args, budget=budget, solver=solver)
    assert measured.saved == saved
    assert measured.products == eager_products(cheap, *args) == 2


def chain(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
    x = x.cos()
    for w in ws:
        x = torch.mm(x, w).cos()
    return x.sum()


@pytest.mark.parametrize(
    ("tenths", "solver"),
    [*((k, "auto") for k in range(11)), *((k, s) for k in (2, 7) for s in SOLVERS[1:])],
)
def test_products_are_recomputed_last(tenths: int, solver: str) -> None:
    args = [matrix() for _ in range(6)]
    eager = eager_products(chain, *args)
    measured = measure(chain, *args, budget=tenths / 10, solver=solver)
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
    args = matrix(1, 1), matrix(1, 4), matrix(2, 2), matrix(2, 2)
    eager = eager_products(two, *args)
    everything = measure(two, *args, budget=1, solver=solver)
    assert (everything.saved, everything.products) == (8, eager)
    torch._dynamo.reset()
    half = measure(two, *args, budget=0.5, solver=solver)
    assert (half.saved, half.products) == (4, eager + 4)


def tagged(policy: CheckpointPolicy) -> Callable[..., torch.Tensor]:
    """Two products in a checkpointed region whose policy is ``policy`` for products."""

    def for_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        return policy if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def region(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w1).cos(), w2).cos()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(for_products)

    def f(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        y = checkpoint(region, x, w1, w2, use_reentrant=False, context_fn=contexts)
        return y.sum()

    return f


def products_of(plan: remat.Plan, names: tuple[str, ...]) -> list[str]:
    targets = {
        n.name: n.target
        for module in (plan.forward, plan.backward)
        for n in module.graph.nodes
        if n.op == "call_function"
    }
    return [n for n in names if targets.get(n) is torch.ops.aten.mm.default]


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_what_must_be_saved_is_saved(budget: float) -> None:
    args = [matrix() for _ in range(3)]
    measured = measure(tagged(CheckpointPolicy.MUST_SAVE), *args, budget=budget)
    assert measured.products == 4, "backward has four products of its own"
    assert measured.saved >= 2
    assert products_of(measured.plan, measured.plan.recomputed) == []


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_what_must_be_recomputed_is_recomputed(budget: float) -> None:
    args = [matrix() for _ in range(3)]
    measured = measure(tagged(CheckpointPolicy.MUST_RECOMPUTE), *args, budget=budget)
    assert measured.products == 6, "backward has four products of its own, and recomputes two"
    assert measured.saved == 0
    assert len(products_of(measured.plan, measured.plan.recomputed)) == 2


def test_without_tags_the_same_region_saves_its_products() -> None:
    """The two tests above would not notice a tag that does nothing, if this did not hold."""

    def f(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w1).cos(), w2).cos().sum()

    args = [matrix() for _ in range(3)]
    assert measure(f, *args, budget=1).products == 4
    torch._dynamo.reset()
    assert measure(f, *args, budget=0).products == 6
