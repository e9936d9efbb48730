"""Operators that do more than compute: they are logged here, each call once, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._library.effects import EffectType
from torch.utils.checkpoint import checkpoint

from remat.graph import ops
from tests.hard.steps import check, pair, step

T = torch.Tensor

LOG: list[float] = []


@pytest.fixture(autouse=True)
def _empty_log() -> Iterator[None]:
    LOG.clear()
    yield
    LOG.clear()


@torch.library.custom_op("remat_hard::note", mutates_args=())
def note(x: T) -> T:
    LOG.append(round(float(x.sum()), 4))
    return x * 2


@torch.library.custom_op("remat_hard::note_gradient", mutates_args=())
def note_gradient(g: T) -> T:
    LOG.append(round(float(g.abs().sum()), 4))
    return g * 2


for operator in (note, note_gradient):
    operator.register_fake(torch.empty_like)
note.register_autograd(lambda ctx, g: note_gradient(g))
for name in ("note", "note_gradient"):
    torch.library._register_effectful_op(f"remat_hard::{name}", EffectType.ORDERED)


def noted(x: T, w: T) -> T:
    y = note(torch.tanh(x @ w)).exp()
    return note(y.sin()).cos()  # type: ignore[no-any-return]


def unread(x: T, w: T) -> T:
    h = torch.tanh(x @ w)
    note(h)
    return h.exp()


@pytest.mark.parametrize("program", [noted, unread], ids=lambda f: f.__name__)
def test_every_effect_happens_once_and_in_order(program: Callable[..., Any]) -> None:
    step(program, pair())
    wanted = list(LOG)
    LOG.clear()
    plans = check(lambda: (program, pair()), captured=program is noted)
    assert (1 + len(plans)) * wanted == LOG
    for plan in plans:
        assert not any(n.startswith(("note", "with_effects")) for n in plan.recomputed)


def test_under_inductor() -> None:
    check(lambda: (noted, pair()), lower="inductor")


def test_an_effect_in_a_checkpointed_region_happens_once() -> None:
    """Eager PyTorch runs the region again in backward, and its effects too."""

    def f(x: T, w: T) -> T:
        def block(a: T) -> T:
            return note(torch.tanh(a @ w)).exp()  # type: ignore[no-any-return]

        return checkpoint(block, x, use_reentrant=False).sin()  # type: ignore[no-any-return]

    step(f, pair())
    assert len(LOG) == 3
    LOG.clear()
    check(lambda: (f, pair()), budgets=(0, 1))
    assert len(LOG) == 3 + 2 * 2, "eager, then twice a call in forward and one in backward"


def test_effects_are_seen_inside_the_graphs_that_an_operator_calls() -> None:
    inner = torch.fx.Graph()
    x = inner.placeholder("x")
    inner.output((inner.call_function(torch.ops.aten._print.default, ("called",)), x))
    outer = torch.fx.Graph()
    region, y = outer.get_attr("region"), outer.placeholder("y")
    target = torch.ops.higher_order.invoke_subgraph
    called = outer.call_function(target, (region, "fw", y))
    module = torch.fx.GraphModule({"region": torch.fx.GraphModule({}, inner)}, outer)
    (called,) = module.graph.find_nodes(op="call_function", target=target)
    assert ops.is_effectful(called)
    assert not ops.is_random(called)
    assert not ops.is_collective(called)
