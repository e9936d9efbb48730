"""Custom operators that nobody has declared pure run once, whatever the budget; declared ones may run again."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from tests.fuzz.functions import begin_run, calls, noisy, stir, tagged
from tests.graphs import joint_of
from tests.hard.steps import assert_same, compiled, drawn, step

T = torch.Tensor


@torch.library.custom_op(
    "remat_custom::tagged_mutator",
    mutates_args=("total",),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def tagged_mutator(x: T, total: T) -> T:
    total.add_(torch.rand(()))
    return x * torch.randn(x.shape)


@torch.library.custom_op("remat_custom::pair", mutates_args=())
def pair_of(x: T) -> tuple[T, T]:
    return x + torch.randn(x.shape), x * torch.randn(x.shape)


@torch.library.custom_op("remat_custom::sine", mutates_args=())
def sine(x: T) -> T:
    return x.sin()


sine.register_fake(torch.empty_like)
sine.register_autograd(lambda ctx, g: g * 2)
tagged_mutator.register_fake(lambda x, total: torch.empty_like(x))
pair_of.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
pair_of.register_autograd(lambda ctx, g, h: g + h)

Program = Callable[..., Any]


def plainly(block: Callable[..., T], *args: T) -> T:
    return block(*args)


def checkpointed(block: Callable[..., T], *args: T) -> T:
    return checkpoint(block, *args, use_reentrant=False)  # type: ignore[no-any-return]


def layers(op: Any, run: Callable[..., T] = plainly) -> Program:
    """Layers with dropout on both sides of the operator, so that the order of draws shows."""

    def block(h: T, w: T) -> T:
        return op(torch.tanh(h @ w)).sin().exp()  # type: ignore[no-any-return]

    def f(x: T, w: T) -> T:
        h = x
        for _ in range(2):
            h = F.dropout(run(block, F.dropout(h, 0.3), w), 0.3)
        return op(h).cos() * h  # type: ignore[no-any-return]

    return f


def overwriting(op: Any) -> Program:
    def f(x: T, w: T, total: T) -> T:
        h = torch.tanh(x @ w)
        h = (op(h.detach(), total) + F.dropout(h, 0.3)).sin().exp()
        inner = torch.zeros(())
        return (op(h.detach(), inner) + h).cos() * inner * total

    return f


def both(x: T, w: T) -> T:
    a, b = pair_of(torch.tanh(x @ w))
    return (a.sin() * b.cos()).exp()


def unread(x: T, w: T) -> T:
    """What nobody reads runs where PyTorch's own compilers would run it."""
    h = torch.tanh(x @ w)
    return h.sin() * noisy(h).detach().exp()


def in_a_condition(x: T, w: T) -> T:
    h = torch.tanh(x @ w)
    y = torch.cond(h.sum() > -1e9, lambda a: noisy(a).sin(), lambda a: a.clone(), (h,))
    return F.dropout(y, 0.3).exp()  # type: ignore[no-any-return]


@torch.compiler.nested_compile_region
def region(x: T, w: T) -> T:
    """PyTorch's own partitioner splits it, and recomputes what is tagged."""
    return checkpointed(lambda a, w: noisy(torch.tanh(a @ w)).sin(), x, w).exp()


def in_nested_regions(x: T, w: T) -> T:
    return F.dropout(region(region(x, w).tanh(), w), 0.3)


PROGRAMS: dict[str, Program] = {
    "noisy in regions": layers(noisy, checkpointed),
    "mutator": overwriting(stir),
    "tagged": layers(tagged),
    "tagged mutator": overwriting(tagged_mutator),
    "two results": both,
    "unread": unread,
    "in a condition": in_a_condition,
    "in nested regions": in_nested_regions,
}


def arguments(name: str) -> tuple[T, ...]:
    # The state of a generator takes 5,056 bytes: only what is larger pays to be drawn again.
    given = (drawn(40, 48), drawn(48, 48))
    return (*given, torch.zeros(())) if "mutator" in name else given


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_do_not_change_with_the_budget(name: str) -> None:
    begin_run()
    expected = step(PROGRAMS[name], arguments(name))
    # Eager PyTorch runs the two regions again in backward.
    count = 3 if name == "noisy in regions" else int(calls())
    for budget in (0, 1):
        torch._dynamo.reset()
        begin_run()
        assert_same(step(compiled(PROGRAMS[name], budget=budget), arguments(name)), expected)
        if not name.startswith("tagged") and name != "in nested regions":
            assert int(calls()) == count, f"at budget {budget}"
        if budget == 0 and name == "tagged":
            again = remat.plans()[-1].recomputed
            assert any(n.startswith("tagged") for n in again), "its draw may be replayed"


def test_under_inductor() -> None:
    name = "noisy in regions"
    expected = step(PROGRAMS[name], arguments(name))
    begin_run()
    left = step(compiled(PROGRAMS[name], budget=0, lower="inductor"), arguments(name))
    assert_same(left, expected, tolerance=1e-3)
    assert int(calls()) == 3


@contextlib.contextmanager
def declared() -> Iterator[None]:
    remat.declare_pure(sine)
    try:
        yield
    finally:
        remat.undeclare_pure("remat_custom::sine")


def test_a_declared_operator_may_run_again() -> None:
    def least() -> tuple[bool, str]:
        torch._dynamo.reset()
        assert_same(step(compiled(layers(sine), budget=0), arguments("sine")), expected)
        plan = remat.plans()[-1]
        return any(n.startswith("sine") for n in plan.recomputed), plan.explain()

    expected = step(layers(sine), arguments("sine"))
    again, text = least()
    assert not again
    assert 'remat.declare_pure("remat_custom::sine")' in text
    with declared():
        again, text = least()
        assert again
        assert "declare_pure" not in text
        joint = joint_of(lambda x, w: sine(torch.tanh(x @ w)).sin(), *arguments("sine"))
        assert "sine" not in remat.plan(joint, 1).recomputed, "it is not known to be cheap"


def test_a_plan_made_under_other_declarations_is_refused() -> None:
    joint = remat.capture(layers(sine), arguments("sine"), lower="eager")
    plan = remat.plan(joint, 0)
    key = remat.partitioner().uuid()
    with declared():
        assert remat.partitioner().uuid() != key
        with pytest.raises(remat.RematError, match="or operators were declared pure: plan again"):
            remat.plan(joint, plan=plan)
    assert remat.partitioner().uuid() == key
    assert remat.plan(joint, plan=plan).saved == plan.saved


def insisting(x: T, w: T) -> T:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE

    def block(a: T) -> T:
        return noisy(torch.tanh(a @ w)).sin()  # type: ignore[no-any-return]

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts).cos()  # type: ignore[no-any-return]


def test_insisting_on_a_second_run_is_refused_by_name() -> None:
    with pytest.raises(Exception, match=r"'noisy' is tagged MUST_RECOMPUTE") as caught:
        step(compiled(insisting, budget=1), arguments("noisy"))
    assert "remat.declare_pure('remat_fuzz::noisy')" in str(caught.value)
    assert "return noisy(torch.tanh(a @ w)).sin()" in str(caught.value)


@torch.library.custom_op("remat_custom::tally", mutates_args=("total",))
def tally(x: T, total: T) -> T:
    total.add_(1.0)
    return x * 2


tally.register_fake(lambda x, total: torch.empty_like(x))


class Tallied(torch.nn.Module):
    """Updates a buffer twice; backward reads what it was in between."""

    total: T

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: T) -> T:
        for layer in self.layers:
            h = torch.tanh(layer(x))
            x = x + torch.sin(h * tally(h.detach(), self.total) + self.total)
        return x


class Shifted(torch.nn.Module):
    """Adds to some elements of a buffer, reads it, and shifts it by one."""

    line: T
    at: T

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("line", torch.zeros(5))
        self.register_buffer("at", torch.tensor([0, 0, 3]))
        self.weight = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x: T) -> T:
        self.line.index_add_(0, self.at, torch.ones(3))
        y = (x @ (self.weight * (self.line * torch.arange(5.0)).sum())).tanh()
        self.line.copy_(self.line.roll(1))
        return y


@pytest.mark.parametrize(
    ("model", "width", "options"),
    [(Tallied, 8, {"budget": 0.5, "solver": "cut"}), (Shifted, 6, {"budget": 0.5})],
)
def test_what_a_buffer_was_is_kept_from_inductor(model: Any, width: int, options: Any) -> None:
    """Plain Inductor overwrites it (see `no_unsound_reinplacing`): gradients off by 0.4, a buffer of zeros."""
    torch.manual_seed(0)
    plain, x = model(), drawn(4, width)
    own = copy.deepcopy(plain)
    expected = step(plain, (x,), plain)
    left = step(compiled(own, lower="inductor", **options), (drawn(4, width),), own)
    assert_same(left, expected)
