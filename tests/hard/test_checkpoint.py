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

import remat
from remat.errors import PlanError
from tests.graphs import joint_of
from tests.hard.steps import assert_same, check, compiled, drawn, pair, step

T = torch.Tensor


checkpoint: Any = partial(torch_checkpoint, use_reentrant=False)


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
        # The block's own backward does not read the result, so the policy decides on everything that it reads.
        return torch.sin(a @ w).exp().neg()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, checkpoint(block, x, context_fn=contexts).cos(), context_fn=contexts)  # type: ignore[no-any-return]


PROGRAMS: list[Callable[..., Any]] = [nested, dropping, selective, strict]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_tags_hold_at_every_budget(program: Callable[..., Any]) -> None:
    for plan in check(lambda: (program, pair()), captured=program is dropping):
        again = {n.rstrip("_0123456789") for n in plan.recomputed}
        if program is selective:
            assert "mm" not in again
            assert "mm" in plan.saved
        elif program is strict:
            assert "mm" in again
            assert again.isdisjoint({"sin", "exp"})
        else:
            assert again >= {"mm", "tanh"}


OFFLOADING = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
#: A link, and costs in units of time that are those of the machine tests run on.
LINK: dict[str, Any] = {"offload": "25GB/s", "cost": "roofline:epyc"}


def for_the_host(tag: CheckpointPolicy) -> Callable[..., Any]:
    def f(x: T, w: T) -> T:
        return selected(x, w, {torch.ops.aten.sin.default: tag})

    return f


def square_pair() -> tuple[T, T]:
    return drawn(64, 64), drawn(64, 64)


@pytest.mark.parametrize(
    ("tag", "budget", "lower", "link"),
    [
        (OFFLOADING[0], 0, "eager", {}),
        (OFFLOADING[1], 1, "eager", {}),
        (OFFLOADING[0], remat.Peak(0.0), "eager", LINK),
        (OFFLOADING[1], remat.Peak(0.5), "eager", LINK),
        (OFFLOADING[0], remat.Peak(1.0), "inductor", {**LINK, "cost": "roofline-fused:epyc"}),
    ],
)
def test_what_is_tagged_for_the_host_is_offloaded(
    tag: Any, budget: Any, lower: Any, link: dict[str, Any]
) -> None:
    f = for_the_host(tag)
    f_compiled = compiled(f, lower=lower, budget=budget, **link)
    left, expected = step(f_compiled, square_pair()), step(f, square_pair())
    assert_same(left, expected, 1e-4 if lower == "inductor" else 1e-5)
    plan = remat.plans()[-1]
    joint = remat.capture(f, square_pair(), lower=lower)
    again = remat.plan(joint, plan=remat.plan(joint, budget, **link).to_json())
    for made in (plan, again):
        assert {"sin", "sin_1"} <= {*made.offloaded}
        assert {"sin", "sin_1"}.isdisjoint(made.recomputed)
        assert made.peak_bytes <= (made.peak_limit or made.peak_bytes)
    text = plan.explain()
    assert "tagged for the host's memory is saved" not in text
    host = f"{plan.host_bytes // 1024} KiB in the host's memory at one time, over pcie4"
    assert link or host in text


def test_every_plan_of_a_frontier_offloads_what_is_tagged() -> None:
    joint = remat.capture(for_the_host(OFFLOADING[1]), square_pair(), lower="eager")
    found = remat.frontier(joint, by="peak", **LINK)
    for point in found.points:
        plan = found.plan(point)
        assert {"sin", "sin_1"} <= set(plan.offloaded)
        assert plan.peak_bytes == point.peak_bytes


def test_a_view_that_is_tagged_for_the_host_is_offloaded_itself() -> None:
    """What it looks at is recomputed, so the view alone is saved."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        viewing = op is torch.ops.aten.view.default
        return OFFLOADING[0] if viewing else CheckpointPolicy.MUST_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def block(a: T) -> T:
        return a.sin().view(-1).exp()

    def f(x: T) -> T:
        return checkpoint(block, x.cos(), context_fn=contexts).sin()  # type: ignore[no-any-return]

    joint = remat.capture(f, (drawn(64, 64),), lower="eager")
    plan = remat.plan(joint, 0)
    assert "view" in plan.saved
    assert plan.offloaded == ("view",)
    # Within a peak, a value without a tag goes to the host too, which recomputes less.
    within = remat.plan(joint, remat.Peak(1.0), **LINK)
    assert within.offloaded == ("cos_2", "view")
    assert within.recompute_cost + within.exposed_time < plan.recompute_cost + plan.exposed_time


def test_what_cannot_go_to_the_host_is_refused_or_saved() -> None:
    f = for_the_host(OFFLOADING[0])
    joint = remat.capture(f, square_pair(), lower="eager", dynamic=True)
    with pytest.raises(
        PlanError, match=r"'sin' is tagged .* by MUST_CPU_OFFLOAD, .*: its size is symbolic"
    ):
        remat.plan(joint, remat.Peak(1.0), **LINK)
    for node in joint.graph.nodes:
        if node.meta.get("recompute") is OFFLOADING[0]:
            node.meta["recompute"] = OFFLOADING[1]
    plan = remat.plan(joint, remat.Peak(1.0), **LINK)
    assert {"sin", "sin_1"} <= {*plan.saved}
    assert not plan.offloads
    assert "tagged for the host's memory is saved: it has a symbolic size" in plan.explain()


def test_the_end_of_a_region_that_others_read_need_not_be_recomputed() -> None:
    """Else its whole region would run again, and stay alive, before the backward of the later region."""
    w = drawn(64, 64)

    def block(a: T) -> T:
        return torch.tanh(a @ w).sin() @ w

    def f(x: T) -> T:
        first, second = (checkpoint(block, y, use_reentrant=False) for y in (x.neg(), x.abs()))
        return (first * second).sum()

    joint = joint_of(f, drawn(64, 64))
    for budget in (1, 0.5, remat.Peak(0.0)):
        plan = remat.plan(joint, budget)
        assert {"mm_1", "mm_3"} <= set(plan.saved)
        assert {"mm", "mm_2"} <= set(plan.recomputed)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: T) -> T:
        def block(a: T) -> T:
            return self.norm(self.linear(a)).relu().exp()  # type: ignore[no-any-return]

        return checkpoint(block, x).sin()  # type: ignore[no-any-return]


def test_a_mutation_inside_happens_once() -> None:
    """Eager PyTorch runs the region twice and so updates the running mean twice; we do not."""

    def make() -> tuple[nn.Module, tuple[T, ...]]:
        torch.manual_seed(0)
        return Normalised(), (drawn(6, 8),)

    model, args = make()
    expected = step(torch.compile(model, backend="aot_eager"), args, model)
    torch._dynamo.reset()
    model, args = make()
    assert_same(step(compiled(model, budget=0), args, model), expected)
    assert model.norm.num_batches_tracked == 1  # type: ignore[union-attr]


def test_a_step_whose_every_value_must_be_saved() -> None:
    """A linear layer of three dimensions ends with ``_unsafe_view``, whose schema names no alias."""

    def step(x: T, w: T) -> T:
        for _ in range(3):
            x = x + F.linear(x, w).exp()
        return x.sum()

    joint = joint_of(step, torch.randn(4, 8, 16), torch.randn(16, 16, requires_grad=True))
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert any("_unsafe_view" in node.name for node in joint.graph.nodes)
    for budget in (0.3, "peak:0.3"):
        assert remat.plan(joint, budget).recompute_cost == 0


def test_regions_that_end_with_one_result_of_a_tuple_are_planned() -> None:
    """The next region reads the result of a LayerNorm, which is saved; its mean is computed again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.n = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: T) -> T:
            return self.n(x + F.gelu(self.l(x)))  # type: ignore[no-any-return]

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: T) -> T:
            for block in self.blocks:
                x = checkpoint(block, x)
            return x.square().mean()

    joint = remat.capture(Blocks(), (torch.randn(32, 8),), lower="eager")
    for budget in (remat.Peak(0.0), remat.Peak(0.3), 0.3):
        plan = remat.plan(joint, budget, cost="roofline:h100")
        assert {"getitem", "getitem_3"} <= {*plan.saved}
        assert "native_layer_norm" in {n.name for n in plan.backward.graph.nodes}
