"""Every rule of the verifier, broken on purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import PlanError
from remat.graph.copying import RUN_OF
from remat.graph.joint import copy_module, output_node
from remat.graph.verify import RULES, Split, verify
from tests.graphs import joint_of, node, weight

Program = Callable[..., Any]


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.cos(), w).exp().sum()


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.mm(torch.mm(x, w).sin(), w).sin() @ x).sum()


def drops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.mm(x, w), 0.5, training=True).sin().sum()


def draws_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first, second = torch.rand(64), torch.rand(64)
    return (torch.mm(x, w) * first + second).sin().sum()


def mutates(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    buf = x.detach()
    y = torch.mm(w, buf.sin()) * buf.cos()
    buf.mul_(2)
    return y.exp().sum()


def routes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.mm(x, w)
    return (w[z.argmax(-1)] * z.exp()).sum()


@functools.cache
def planned(program: Program, budget: float, dynamic: bool) -> tuple[remat.JointGraph, remat.Plan]:
    x = torch.randn(64, 64) if program is mutates else weight(64, 64)
    joint = joint_of(program, x, weight(64, 64), dynamic=dynamic)
    # The runtime-optimal cut alone: what these breakages break does not move with a cost model.
    return joint, remat.plan(joint, budget, "cut" if budget == 1 else "auto")


def split(program: Program = plain, budget: float = 1, *, dynamic: bool = False) -> Split:
    """A split that keeps every rule, in modules of its own."""
    joint, plan = planned(program, budget, dynamic)
    made = Split(
        joint=joint.copy(),
        forward=copy_module(plan.forward),
        backward=copy_module(plan.backward),
        capacity=plan.capacity,
    )
    for half in (made.forward, made.backward):
        for n in half.graph.nodes:
            n.meta = dict(n.meta)
    verify(made)
    return made


def find(module: fx.GraphModule, name: str) -> fx.Node:
    (found,) = (n for n in module.graph.nodes if n.name == name)
    return found


def outputs(module: fx.GraphModule) -> list[Any]:
    return list(output_node(module.graph).args[0])  # type: ignore[arg-type]


def give_back(module: fx.GraphModule, values: list[Any]) -> None:
    output_node(module.graph).args = (tuple(values),)


# Signatures ---------------------------------------------------------------------------------------


def read_too_early(s: Split) -> None:
    exp = find(s.forward, "exp")
    find(s.forward, "mm").prepend(exp)


def read_another_graph(s: Split) -> None:
    find(s.forward, "exp").args = (find(s.backward, "mm"),)


def take_a_tangent(s: Split) -> None:
    with s.forward.graph.inserting_after(find(s.forward, "primals_2")):
        s.forward.graph.placeholder("tangents_1").meta["val"] = torch.empty(())


def return_another_output(s: Split) -> None:
    give_back(s.forward, [find(s.forward, "exp"), *outputs(s.forward)[1:]])


def return_too_little(s: Split) -> None:
    give_back(s.forward, [])


def blank_a_gradient(s: Split) -> None:
    give_back(s.backward, [None, *outputs(s.backward)[1:]])


def forget_a_saved_value(s: Split) -> None:
    give_back(s.forward, outputs(s.forward)[:-1])


def hand_over_in_another_order(s: Split) -> None:
    own, *saved = outputs(s.forward)
    give_back(s.forward, [own, *saved[::-1]])


def hand_over_a_constant(s: Split) -> None:
    give_back(s.forward, [*outputs(s.forward), 7])


def hand_over_sizes_first(s: Split) -> None:
    own, *saved = outputs(s.forward)
    give_back(
        s.forward, [own, *sorted(saved, key=lambda n: isinstance(n.meta["val"], torch.Tensor))]
    )


def take_another_shape(s: Split) -> None:
    taken = find(s.backward, "mm")
    taken.meta["val"] = taken.meta["val"].new_empty(3)


def take_a_tangent_first(s: Split) -> None:
    find(s.backward, "primals_1").prepend(find(s.backward, "tangents_1"))


def describe_too_little(s: Split) -> None:
    out = output_node(s.forward.graph)
    out.meta["desc"] = out.meta["desc"][:-1]


def number_descriptors_wrongly(s: Split) -> None:
    out = output_node(s.forward.graph)
    descs = list(out.meta["desc"])
    out.meta["desc"] = [*descs[:-1], type(descs[-1])(0)]


# What runs ----------------------------------------------------------------------------------------


def draw_again(s: Split) -> None:
    drop = torch.ops.aten.native_dropout.default
    for half in (s.forward, s.backward):
        drawn = find(half, "native_dropout")
        drawn.target, drawn.args = drop, (find(half, "mm"), 0.5, True)


def run_again(s: Split, first: fx.Node) -> fx.Node:
    with s.forward.graph.inserting_after(first):
        again = s.forward.graph.node_copy(first)
    again.meta = {**first.meta, RUN_OF: first.name}
    return again


def draw_twice_in_forward(s: Split) -> None:
    run_again(s, find(s.forward, "rand"))


def have_an_effect_again(s: Split) -> None:
    run_again(s, next(n for n in s.forward.graph.nodes if n.name.startswith("copy_")))


def run_again_from_something_else(s: Split) -> None:
    run_again(s, find(s.forward, "exp")).args = (find(s.forward, "cos"),)


def communicate_twice(s: Split) -> None:
    import torch.distributed._functional_collectives  # registers the operators

    for half in (s.forward, s.backward):
        find(half, "exp").target = torch.ops._c10d_functional.all_reduce.default


def lose_a_draw(s: Split) -> None:
    with s.joint.graph.inserting_before(output_node(s.joint.graph)):
        s.joint.graph.call_function(torch.ops.aten.rand.default, ([3],))


def lose_an_effect(s: Split) -> None:
    graph = s.joint.graph
    with graph.inserting_before(output_node(graph)):
        target = next(n for n in graph.nodes if n.op == "placeholder")
        graph.call_function(torch.ops.aten.copy_.default, (target, target))


def lose_a_collective(s: Split) -> None:
    import torch.distributed._functional_collectives  # registers the operators

    graph = s.joint.graph
    with graph.inserting_before(output_node(graph)):
        target = next(n for n in graph.nodes if n.op == "placeholder")
        graph.call_function(torch.ops._c10d_functional.all_reduce.default, (target, "sum", "0"))


def draw_in_another_order(s: Split) -> None:
    find(s.forward, "rand_1").append(find(s.forward, "rand"))


def recompute_something_else(s: Split) -> None:
    find(s.backward, "exp").target = torch.ops.aten.sin.default


def recompute_from_something_else(s: Split) -> None:
    find(s.backward, "mm").replace_input_with(
        find(s.backward, "primals_2"), find(s.backward, "primals_1")
    )


def recompute_from_less(s: Split) -> None:
    find(s.backward, "mm").args = (find(s.backward, "cos"), find(s.backward, "cos"))


def replay_something_else(s: Split) -> None:
    replay = find(s.backward, "native_dropout")
    replay.args = (replay.args[0], torch.ops.aten.rand_like.default, *replay.args[2:])


# Memory -------------------------------------------------------------------------------------------


def snapshot_too_late(s: Split) -> None:
    """Forward takes the copy of its input after it has written to it."""
    output_node(s.forward.graph).prepend(find(s.forward, "primals_1_snapshot"))


def read_what_was_overwritten(s: Split) -> None:
    """Backward is given the input itself instead of what it was before forward wrote to it."""
    name, saved = "primals_1_snapshot", find(s.forward, "primals_1")
    taken = find(s.backward, name)
    give_back(s.forward, [saved if str(v) == name else v for v in outputs(s.forward)])
    taken._rename("primals_1")
    taken.meta = dict(saved.meta)


def save_two_views_of_one_value(s: Split) -> None:
    *_, one, other = (n for n in outputs(s.forward) if n.op == "call_function")
    other.meta["val"] = one.meta["val"].view(other.meta["val"].shape)


def refill_what_is_read(s: Split) -> Split:
    """The user may refill an input that backward reads."""
    return replace(s, user_mutated=frozenset({"primals_1"}))


def recompute_against_its_tag(s: Split) -> None:
    node(s.joint, "mm").meta["recompute"] = CheckpointPolicy.MUST_SAVE


def save_against_its_tag(s: Split) -> None:
    node(s.joint, "cos").meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def branch_again(s: Split) -> None:
    taken, mm = find(s.backward, "argmax"), find(s.backward, "mm")
    next(n for n in s.backward.graph.nodes if n.op == "call_function").prepend(mm)
    with s.backward.graph.inserting_after(mm):
        made = s.backward.graph.node_copy(find(s.forward, "argmax"), lambda _: mm)
    made.meta = {**made.meta, RUN_OF: "argmax"}
    taken.replace_all_uses_with(made)


def lose_a_fake_value(s: Split) -> None:
    del find(s.forward, "exp").meta["val"]


def spend_more(s: Split) -> Split:
    assert s.capacity is not None
    return replace(s, capacity=s.capacity - 1)


WHOLE = "forward and backward must be whole"
GIVEN = "backward must take just what forward hands over"
ALIKE = "a node that runs in forward and in backward"
READ = "nothing may be read after it was overwritten"
SAVED, RECOMPUTED = {"budget": 1}, {"budget": 0}
REPLAYED, DRAWN = {"program": drops, "budget": 0}, {"program": draws_twice}
MUTATED: dict[str, Any] = {"program": mutates, "budget": 0}
#: What each breakage breaks: arguments of `split`, the rule, and what is said of it.
BREAKAGES: dict[Callable[[Split], Split | None], tuple[dict[str, Any], str, str]] = {
    read_too_early: (SAVED, WHOLE, "forward: Argument 'mm' of Node 'exp' was used before it has been defined"),
    read_another_graph: (RECOMPUTED, WHOLE, "Argument 'mm' of Node 'exp' does not belong to this Graph"),
    take_a_tangent: (SAVED, "forward must take the inputs", "is 'tangents_1', expected None"),
    return_another_output: (SAVED, "forward must return", "output 0 is 'exp', expected 'sum_1'"),
    return_too_little: (SAVED, "forward must return", "forward returns 0 values, expected 1"),
    blank_a_gradient: (SAVED, "backward must return a gradient", "gradient 0 is None"),
    forget_a_saved_value: (SAVED, GIVEN, "'mm' is only on one side"),
    hand_over_in_another_order: (SAVED, GIVEN, "input 0 of backward is 'primals_1', expected 'mm'"),
    hand_over_a_constant: (SAVED, GIVEN, "forward hands over 7, which no node computes"),
    hand_over_sizes_first: ({"dynamic": True}, GIVEN, "'primals_2' is handed over behind"),
    take_another_shape: (SAVED, GIVEN, "but taken as float32[3] on cpu"),
    take_a_tangent_first: (SAVED, "backward must take tangents", "is 'mm', expected 'tangents_1'"),
    describe_too_little: (SAVED, "what forward returns must be described", "describes 4 of 5"),
    number_descriptors_wrongly: (SAVED, "what forward returns must be described", "'mm' is described"),
    draw_again: (REPLAYED, "a random operator must not draw twice", "'native_dropout' (aten.native_"),
    draw_twice_in_forward: (DRAWN, "a random operator must not draw twice", "'rand_2' (aten.rand.default) draws anew in forward"),
    have_an_effect_again: (MUTATED, "an effect must not happen twice", "'copy__1' (aten.copy_.default) has its effect twice"),
    run_again_from_something_else: (SAVED, ALIKE, "'exp_1' reads 'cos' in forward, 'mm' in the joint graph"),
    communicate_twice: (SAVED, "an effect must not happen twice", "'exp' (_c10d_functional.all_redu"),
    lose_a_draw: (SAVED, "random draws and effects must happen", "operator 'rand_default'"),
    lose_an_effect: (SAVED, "random draws and effects must happen", "the effect 'copy__default'"),
    lose_a_collective: (SAVED, "random draws and effects must happen", "the collective 'all_reduce_default'"),
    draw_in_another_order: (DRAWN, "random draws and effects must keep their order", "'rand' (aten.rand.default) runs behind 'rand_1'"),
    recompute_something_else: (SAVED, ALIKE, "'exp' is aten.sin.default in"),
    recompute_from_something_else: (RECOMPUTED, ALIKE, "'mm' reads 'primals_1' in backward, 'primals_2' in forward"),
    recompute_from_less: (RECOMPUTED, ALIKE, "'mm' reads other values"),
    replay_something_else: (REPLAYED, ALIKE, "is aten.rand_like.default in"),
    snapshot_too_late: (MUTATED, READ, "'primals_1_snapshot' (aten.clone.default) reads 'primals_1' behind 'copy_'"),
    save_two_views_of_one_value: ({"program": twice}, "values that are saved must not share", "are in the same memory"),
    read_what_was_overwritten: (MUTATED, READ, "reads 'primals_1', which forward has overwritten"),
    refill_what_is_read: (SAVED, "inputs that may be overwritten must not be read again", "'sin' (aten.sin.default) reads 'primals_1'"),
    branch_again: ({"program": routes, "budget": 0}, "backward must branch as forward did", "'argmax_1' (aten.argmax.default) branches on 'mm'"),
    recompute_against_its_tag: (RECOMPUTED, "tags must hold", "'mm' is tagged MUST_SAVE"),
    save_against_its_tag: (SAVED, "tags must hold", "'cos' is tagged MUST_RECOMPUTE"),
    lose_a_fake_value: (SAVED, "every value must have a fake value", "'exp' has lost"),
    spend_more: (SAVED, "the budget must hold", "32768 bytes are saved, 32767 allowed"),
}  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_a_broken_rule_is_named(breakage: Callable[[Split], Split | None]) -> None:
    how, rule, what = BREAKAGES[breakage]
    s = split(**how)
    broken = breakage(s) or s
    with pytest.raises(PlanError) as caught:
        verify(broken)
    assert str(caught.value).partition("wrongly: ")[2].startswith(rule)
    assert what in str(caught.value)


def test_every_rule_is_broken_here() -> None:
    tested = {rule for _, rule, _ in BREAKAGES.values()}
    assert [r for r, _ in RULES if not any(r.startswith(t) for t in tested)] == []


def test_nodes_are_shown_with_the_users_lines() -> None:
    s = split(draws_twice)
    draw_in_another_order(s)
    with pytest.raises(PlanError) as caught:
        verify(s)
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        f"  {name} = aten.rand.default    # test_verify.py:{line} "
        "first, second = torch.rand(64), torch.rand(64)"
        for name, line in (("rand", LINE), ("rand_1", LINE))
    ]


LINE = draws_twice.__code__.co_firstlineno + 1
