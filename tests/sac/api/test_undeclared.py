"""Custom operators that are not declared pure are stored, and count as random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import PolicyError
from remat.sac import apply, context_fn
from tests.sac import planned

CALLS: list[str] = []


@torch.library.custom_op("remat_sac::counter", mutates_args=())
def counter(x: torch.Tensor) -> torch.Tensor:
    """Draw random numbers and count the calls, without a declaration of either effect."""
    CALLS.append("counter")
    return x * len(CALLS) + torch.randn(x.shape)


counter.register_fake(torch.empty_like)
counter.register_autograd(lambda ctx, g: g * 1.0)


@pytest.fixture(autouse=True)
def _nothing_declared() -> Iterator[None]:
    yield
    remat.undeclare_pure(counter)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = counter(torch.tanh(self.inner(x))).sin()
        return self.outer(nn.functional.dropout(h, 0.2)).exp().tanh()  # type: ignore[no-any-return]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(64, 64))


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 128 * 64).view(128, 64)


def test_a_plan_stores_them() -> None:
    made = model()
    plan = remat.checkpointing.plan(made, (inputs(),), memory=0.8)
    assert plan.modules
    assert 'remat.declare_pure("remat_sac::counter")' in plan.explain()
    CALLS.clear()
    wanted = planned.gradients(made, inputs())
    CALLS.clear()
    assert planned.all_equal(planned.gradients(apply(made, plan), inputs()), wanted)
    assert len(CALLS) == 3


def test_a_declared_one_may_run_again() -> None:
    remat.declare_pure(counter)
    tree = remat.checkpointing.estimate(model(), (inputs(),))
    stats = tree["0"].stats
    assert stats is not None
    assert not stats.force_store_random
    assert "remat_sac.counter.default" not in {stats.func_names[i] for i in stats.rand_ops}


def answering(**verdicts: CheckpointPolicy) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op).split(".")[1]
        return verdicts.get(name, CheckpointPolicy.PREFER_RECOMPUTE)

    return context_fn(policy, module="noisy")


def region(x: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand_like(counter(x.tanh()).sin())
    return (counter(x.cos()) * drawn).exp()


def gradient(contexts: Any = None) -> torch.Tensor:
    CALLS.clear()
    torch.manual_seed(1)
    return planned.gradient(region, torch.linspace(-1, 1, 8, requires_grad=True), contexts)


def test_a_policy_that_would_rather_recompute_one_stores_it() -> None:
    wanted = gradient()
    assert torch.equal(gradient(answering()), wanted)
    assert len(CALLS) == 2


def test_a_draw_behind_one_that_must_be_recomputed_is_refused() -> None:
    with pytest.raises(PolicyError) as caught:
        gradient(answering(rand_like=CheckpointPolicy.MUST_RECOMPUTE))
    assert "random operator aten.rand_like.default cannot be MUST_RECOMPUTE" in str(caught.value)
    assert "remat.declare_pure('remat_sac::counter')" in str(caught.value)
