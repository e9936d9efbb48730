"""Regions under ``torch.utils.checkpoint``: nested, selective, random, with effects of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.hard.steps import assert_same, check, compiled, drawn, pair, step

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

T = torch.Tensor


checkpoint: Any = partial(torch_checkpoint, use_reentrant=False)


def in_a_row(x: T, w: T) -> T:
    def block(a: T) -> T:
        return torch.tanh(a @ w).exp()

    return checkpoint(block, checkpoint(block, x).sin()).cos()


def nested(x: T, w: T) -> T:
    def block(a: T) -> T:
        return torch.tanh(a @ w).exp()

    return checkpoint(lambda a: block(checkpoint(block, a)).sin(), x).cos()


def dropping(x: T, w: T) -> T:
    def block(a: T) -> T:
        return F.dropout(torch.tanh(a @ w), 0.4).exp()

    return checkpoint(block, checkpoint(block, x).sin()).cos()


def selective(x: T, w: T) -> T:
    return selected(x, w, {torch.ops.aten.mm.default: CheckpointPolicy.MUST_SAVE})


def strict(x: T, w: T) -> T:
    kept = {torch.ops.aten.mm.default: CheckpointPolicy.MUST_RECOMPUTE}
    return selected(x, w, kept, CheckpointPolicy.MUST_SAVE)


def selected(
    x: T, w: T, asked: dict[Any, Any], otherwise: Any = CheckpointPolicy.PREFER_RECOMPUTE
) -> T:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return asked.get(op, otherwise)  # type: ignore[no-any-return]

    def block(a: T) -> T:
        return torch.sin(a @ w).exp()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, checkpoint(block, x, context_fn=contexts).cos(), context_fn=contexts)  # type: ignore[no-any-return]


PROGRAMS: list[Callable[..., Any]] = [in_a_row, nested, dropping, selective, strict]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_tags_hold_at_every_budget(program: Callable[..., Any]) -> None:
    for plan in check(lambda: (program, pair())):
        again = {n.rstrip("_0123456789") for n in plan.recomputed}
        if program is selective:
            assert "mm" not in again
            assert "mm" in plan.saved
        elif program is strict:
            assert "mm" in again
            assert again.isdisjoint({"sin", "exp"})
        else:
            assert again >= {"mm", "tanh"}


def test_under_inductor() -> None:
    check(lambda: (dropping, pair()), budgets=(0,), lower="inductor", tolerance=1e-4)


def test_a_plan_of_a_captured_graph_fits() -> None:
    check(lambda: (dropping, pair()), budgets=(0,), captured=True)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: T) -> T:
        def block(a: T) -> T:
            return self.norm(self.linear(a)).relu().exp()  # type: ignore[no-any-return]

        return checkpoint(block, x).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", [0, 1])
def test_a_mutation_inside_happens_once(budget: float) -> None:
    """Eager PyTorch runs the region twice and so updates the running mean twice; we do not."""

    def make() -> tuple[nn.Module, tuple[T, ...]]:
        torch.manual_seed(0)
        return Normalised(), (drawn(6, 8),)

    model, args = make()
    expected = step(torch.compile(model, backend="aot_eager"), args, model)
    torch._dynamo.reset()
    model, args = make()
    assert_same(step(compiled(model, budget=budget), args, model), expected)
    assert model.norm.num_batches_tracked == 1  # type: ignore[union-attr]


def test_a_condition_inside_is_refused_by_pytorch() -> None:
    def f(x: T) -> T:
        def block(a: T) -> T:
            return torch.cond(a.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (a,))  # type: ignore[no-any-return]

        return checkpoint(block, x).cos()  # type: ignore[no-any-return]

    with pytest.raises(Exception, match="no rule registered for HigherOrderOperator cond"):
        compiled(f, budget=0)(drawn(3))
