"""Inputs that are refilled between forward and backward: what eager PyTorch trains with, a plan does too."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from remat.errors import PlanError
from tests.hard import steps

T = torch.Tensor


def drawn(*shape: int, seed: int = 0) -> T:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Reads a differentiated input, one that is none, indices, a mask, a target, and overwrites one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(10, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: T, h: T, ids: T, mask: T, target: T) -> Any:
        self.seen.add_(x.detach().mean(0))
        h = self.linear(x.tanh()) + self.table(ids.clamp(0, 9)) + h.exp()
        h = F.dropout(h) * self.seen.sin()
        x.mul_(2)
        h = (h @ self.linear.weight).sin() * mask.float()[:, None] * x.view(-1).cos().view(x.shape)
        return F.mse_loss(h, target.exp()), h[1:]


def net_args(n: int) -> list[T]:
    return [
        drawn(n, 8),
        drawn(n, 8, seed=1).requires_grad_(),
        torch.arange(n),
        drawn(n, seed=2) > 0,
        drawn(n, 8, seed=3),
    ]


PLAIN = nn.Parameter(drawn(16, 16))


def plain(x: T) -> T:
    """The loader's buffer: eager autograd saves what is computed of it."""
    h = (x.tanh() @ x).sin() @ PLAIN
    return (h.cos() @ PLAIN).sin().sum()


JOINT = functools.cache(lambda: remat.capture(plain, (drawn(16, 16),), lower="eager"))


def stepped(
    f: Callable[..., Any], params: list[T], args: list[T], *, refill: bool
) -> list[T | None]:
    """Gradients of parameters and of inputs; with ``refill``, all inputs are zeroed before backward."""
    for p in params:
        p.grad = None
    torch.manual_seed(5)
    out = f(*args)
    loss = out if isinstance(out, T) else out[0] + out[1].sum()
    if refill:
        with torch.no_grad():
            for a in args:
                a.zero_()
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in [*params, *args]]


def compiled(f: Any, *, lower: str = "eager", dynamic: bool | None = None, **options: Any) -> Any:
    """The program on plans that read no input again, unless the options say so."""
    return steps.compiled(f, lower=lower, how={"dynamic": dynamic}, reread_inputs=False, **options)


def same(found: list[T | None], expected: list[T | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def trains_as_eager(f: Callable[..., Any], *, refill: bool = True) -> None:
    """Whether a step of `plain` leaves the gradients of eager PyTorch."""
    mine, theirs = (stepped(g, [PLAIN], [drawn(16, 16)], refill=refill) for g in (f, plain))
    same(mine, theirs)


@pytest.mark.parametrize("budget", [0, 0.5])
def test_refilled_buffers_train_as_in_eager(budget: float) -> None:
    trains_as_eager(compiled(plain, budget=budget))
    plan = remat.plans()[-1]
    assert plan.saved_bytes <= plan.capacity
    assert not plan.reread
    assert not plan.reread_inputs


def test_reading_again_is_the_default_and_is_told() -> None:
    """The plan names what it reads again, and autograd refuses just that."""
    f = torch.compile(plain, backend="remat", options={"lower": "eager", "budget": 0})
    trains_as_eager(f, refill=False)
    plan = remat.plans()[-1]
    assert plan.reread == ("primals_1",)
    assert "primals_1  float32[16, 16]  read at" in plan.explain()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stepped(f, [PLAIN], [drawn(16, 16)], refill=True)
    for plan in (remat.plan(JOINT(), 1), remat.plan(JOINT(), 0, reread_inputs=False)):
        assert plan.reread == ()
        assert "reads inputs again" not in plan.explain()


def test_inputs_of_every_kind() -> None:
    """With symbolic sizes."""
    net, before = Net(), len(remat.plans())
    params = list(net.parameters())
    f = compiled(net, dynamic=True, budget=0)
    for n in (5, 7):
        found = []
        for g in (net, f):
            net.seen.zero_()
            found.append(stepped(g, params, net_args(n), refill=True))
        same(found[1], found[0])
    assert len(remat.plans()) == before + 1


def test_a_copy_is_kept_where_it_is_the_smallest_way() -> None:
    """Bytes rather than floats: the copy counts, and recomputing starts from it."""
    weight = nn.Parameter(drawn(64, 8))

    def f(image: T) -> T:
        return ((image.float() / 255).cos() @ weight).sin().sum()

    pixels = torch.arange(512, dtype=torch.uint8).view(8, 64)
    joint = remat.capture(f, (pixels,), lower="eager")
    plan = remat.plan(joint, 0, reread_inputs=False)
    assert plan.snapshots == ("primals_1",)
    assert plan.saved_bytes == 512
    expected = stepped(f, [weight], [pixels.clone()], refill=False)
    f_compiled = torch.compile(f, backend="remat", options={"plan": plan, "lower": "eager"})
    same(stepped(f_compiled, [weight], [pixels.clone()], refill=True), expected)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_checkpointed_regions_start_from_a_copy(lower: str) -> None:
    """Eager checkpointing reads the input again, refilled or not; here the gradient stays right."""

    def f(x: T) -> Any:
        return checkpoint(lambda y: (y.tanh() @ PLAIN).sin(), x, use_reentrant=False).sum()

    expected = stepped(f, [PLAIN], [drawn(16, 16)], refill=False)
    f_compiled = compiled(f, lower=lower, budget=1)
    same(stepped(f_compiled, [PLAIN], [drawn(16, 16)], refill=True), expected)
    assert remat.plans()[-1].snapshots == ("primals_1",)


def test_every_solver_keeps_to_it() -> None:
    joint = remat.capture(Net(), net_args(6), lower="eager")
    for solver in ("greedy", "lagrangian", "auto"):
        for budget in (0, 0.3, 0.6, 1):
            plan = remat.plan(joint, budget, solver, reread_inputs=False)
            assert not plan.reread
            assert plan.saved_bytes <= plan.capacity
            assert plan.recompute_bound <= plan.recompute_cost


def test_saved_plans_carry_the_option() -> None:
    text = remat.plan(JOINT(), 0, reread_inputs=False).to_json()
    assert remat.plan(JOINT(), plan=remat.Plan.from_json(text)).reread_inputs is False
    trains_as_eager(torch.compile(plain, backend="remat", options={"plan": text, "lower": "eager"}))
    plan = remat.plan(JOINT(), 0.5)
    data = json.loads(plan.to_json())
    assert remat.Plan.from_json(plan.to_json()).reread_inputs is True
    del data["reread_inputs"], data["reread"]
    assert remat.Plan.from_json(json.dumps(data)).reread_inputs is True, "of an older version"
    with pytest.raises(PlanError, match=r"plan again with .*reread_inputs=False"):
        remat.plan(JOINT(), plan=plan, reread_inputs=False)


def test_every_door_takes_it() -> None:
    joint = JOINT()
    least = remat.plan(joint, 0, reread_inputs=False).saved_bytes
    assert least > remat.plan(joint, 0).saved_bytes
    assert remat.frontier(joint, reread_inputs=False).least_bytes == least
    assert remat.instance(joint, reread_inputs=False).least_bytes == least
    rows = remat.compare(joint, ("greedy",), (0,), reread_inputs=False).rows
    assert rows[0].saved_bytes == least
    by_pipeline = remat.plan(joint, pipeline=str(remat.default_pipeline(0)), reread_inputs=False)
    assert by_pipeline.saved_bytes == least
    plans = remat.plan([joint], 0, reread_inputs=False)
    assert [p.reread_inputs for p in plans] == [False]
    keys = {remat.partitioner(reread_inputs=r).uuid() for r in (True, False)}
    assert len(keys) == 2
