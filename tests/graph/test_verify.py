"""Every rule of the verifier, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import PlanError
from remat.graph.joint import copy_module, output_node
from remat.graph.verify import RULES, Split, verify
from tests.graphs import joint_of, node, weight


def split(budget: float, *, random: bool = False) -> Split:
    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.cos(), w).exp().sum()

    def drops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.mm(x, w), 0.5, training=True).sin().sum()

    joint = joint_of(drops if random else plain, weight(64, 64), weight(64, 64))
    plan = remat.plan(joint, budget)
    made = Split(
        joint=joint,
        forward=copy_module(plan.forward),
        backward=copy_module(plan.backward),
        capacity=plan.capacity,
    )
    verify(made)
    return made


def find(module: fx.GraphModule, name: str) -> fx.Node:
    (found,) = (n for n in module.graph.nodes if n.name == name)
    return found


def forget_a_saved_value(s: Split) -> Split:
    out = output_node(s.forward.graph)
    out.args = (out.args[0][:-1],)  # type: ignore[index]
    return s


def drop_a_gradient(s: Split) -> Split:
    out = output_node(s.backward.graph)
    out.args = (out.args[0][:-1],)  # type: ignore[index]
    return s


def blank_a_gradient(s: Split) -> Split:
    out = output_node(s.backward.graph)
    out.args = ((None, *out.args[0][1:]),)  # type: ignore[index]
    return s


def draw_again(s: Split) -> Split:
    drawn = find(s.forward, "native_dropout")
    drawn.target, drawn.args = (
        torch.ops.aten.native_dropout.default,
        (find(s.forward, "mm"), 0.5, True),
    )
    replayed = find(s.backward, "native_dropout")
    replayed.target = torch.ops.aten.native_dropout.default
    replayed.args = (find(s.backward, "mm"), 0.5, True)
    return s


def mutate_twice(s: Split) -> Split:
    for module in (s.forward, s.backward):
        graph = module.graph
        with graph.inserting_before(output_node(graph)):
            target = next(n for n in graph.nodes if n.op == "placeholder")
            written = graph.call_function(torch.ops.aten.copy_.default, (target, target))
            written._rename("written")
    return s


def lose_a_draw(s: Split) -> Split:
    graph = s.joint.graph
    with graph.inserting_before(output_node(graph)):
        graph.call_function(torch.ops.aten.rand.default, ([3],))
    return s


def lose_an_effect(s: Split) -> Split:
    graph = s.joint.graph
    with graph.inserting_before(output_node(graph)):
        target = next(n for n in graph.nodes if n.op == "placeholder")
        graph.call_function(torch.ops.aten.copy_.default, (target, target))
    return s


def recompute_against_its_tag(s: Split) -> Split:
    node(s.joint, "mm").meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return s


def save_against_its_tag(s: Split) -> Split:
    node(s.joint, "cos").meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return s


def spend_more(s: Split) -> Split:
    assert s.capacity is not None
    return replace(s, capacity=s.capacity - 1)


BREAKAGES: dict[Callable[[Split], Split], tuple[float, bool, str, str]] = {
    forget_a_saved_value: (1, False, "backward must get just what forward hands over", "'mm'"),
    drop_a_gradient: (1, False, "both halves must keep the signature", "returns 1 values"),
    blank_a_gradient: (1, False, "both halves must keep the signature", "gradient 0 is None"),
    draw_again: (0, True, "a random operator must not draw twice", "'native_dropout'"),
    mutate_twice: (1, False, "an effect must not happen twice", "'written'"),
    lose_a_draw: (1, False, "random draws and effects must happen", "'rand_default'"),
    lose_an_effect: (1, False, "random draws and effects must happen", "'copy__default'"),
    recompute_against_its_tag: (0, False, "tags must hold", "'mm' is tagged MUST_SAVE"),
    save_against_its_tag: (1, False, "tags must hold", "'cos' is tagged MUST_RECOMPUTE"),
    spend_more: (1, False, "the budget must hold", "bytes are saved"),
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_a_broken_rule_is_named(breakage: Callable[[Split], Split]) -> None:
    budget, random, rule, what = BREAKAGES[breakage]
    broken = breakage(split(budget, random=random))
    with pytest.raises(PlanError) as caught:
        verify(broken)
    assert rule in str(caught.value)
    assert what in str(caught.value)


def test_every_rule_is_broken_here() -> None:
    tested = {rule for _, _, rule, _ in BREAKAGES.values()}
    assert [r for r, _ in RULES if not any(r.startswith(t) for t in tested)] == []
