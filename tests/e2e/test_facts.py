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
from tests.steps import Recorded, recording_backend, run_graphs

N = 128
MATRIX = 4 * N * N
PRODUCT = 2 * N**3
#: Each decides alone; PyTorch's expectations hold for all of them.
SOLVERS = ("auto", "cpsat", "dp")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One step on a plan.

    Attributes:
        saved: bytes that forward really returned to backward, in matrices.
        products: products that both really computed, in units of one.
        plan: what it ran on.
    """

    saved: float
    products: float
    plan: remat.Plan


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
        return Measured(saved=kept / MATRIX, products=products, plan=plan)


def counted(run: Callable[[], object]) -> float:
    """Products that something computes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / PRODUCT


def matrix(rows: int = 1, columns: int = 1) -> torch.Tensor:
    return torch.randn(rows * N, columns * N, requires_grad=True)


def cheap(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.cos(), w).sum()


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_is_cheap_is_recomputed(solver: str) -> None:
    step = Step(cheap, matrix(), matrix())
    for budget, saved in ((1, 1.0), (0.5, 0.0)):
        measured = step.measure(budget, solver)
        assert measured.saved == saved
        assert measured.products == step.eager_products() == 3


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


#: Two products in forward, and four in backward.
OWN = 6


@pytest.mark.parametrize(
    ("policy", "again"), [(CheckpointPolicy.MUST_SAVE, 0), (CheckpointPolicy.MUST_RECOMPUTE, 2)]
)
def test_tags_on_products_hold(policy: CheckpointPolicy, again: int) -> None:
    step = Step(tagged(policy), *(matrix() for _ in range(3)))
    for budget in (0, 0.5, 1):
        measured = step.measure(budget)
        assert measured.products == OWN + again
        assert measured.saved == 0 if again else measured.saved >= 2
        assert len(products_of(measured.plan, measured.plan.recomputed)) == again


def test_without_tags_the_same_region_saves_its_products() -> None:
    """The test above would not notice a tag that does nothing, if this did not hold."""

    def f(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w1).cos(), w2).cos().sum()

    step = Step(f, *(matrix() for _ in range(3)))
    assert step.measure(1).products == OWN
    assert step.measure(0).products == OWN + 2
