"""Copies of nodes: the quick way gives what PyTorch's own way gives."""

from __future__ import annotations

import copy
import operator
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import remat
from remat.graph.copying import Copier
from tests.graphs import calls, joint_of, traced, weight


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values, places = (x @ w).relu().topk(2, dim=1)
    return torch.cat([values.sin(), values * 2.0], 1).sum() + places.sum()


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return joint_of(step, torch.randn(4, 4), weight(4, 4))


def copied(source: fx.Graph, *, quick: bool | None = None) -> fx.Graph:
    graph = fx.Graph()
    Copier(graph, source, quick=quick).copy(source.nodes)
    return graph


def outline(graph: fx.Graph) -> list[Any]:
    """All that one can ask of a graph, as text."""
    found: list[Any] = [
        len(graph.nodes),
        str(graph),
        graph.python_code("self").src,
        [n.name for n in sorted(graph.nodes)],
    ]
    for n in graph.nodes:
        parts = (n.name, n.op, str(n.target), n.args, n.kwargs, n.type, sorted(n.meta))
        kinds = [type(a) for a in (n.args, n.kwargs, *n.args)]
        found.append(repr((parts, kinds, list(n.users), n.all_input_nodes)))
        alike = graph.find_nodes(op=n.op, target=n.target if n.op == "call_function" else None)
        found.append([m.name for m in alike])
    return found


def edit(graph: fx.Graph) -> None:
    """What later passes do to a graph."""
    (cat,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    with graph.inserting_after(cat):
        more = graph.call_function(torch.ops.aten.neg.default, (cat,))
        cat.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    cat.target = torch.ops.aten.hstack.default
    cat.args = (cat.args[0],)
    graph.create_node("call_function", torch.ops.aten.sin.default, (more,), name="sin")
    (more,) = (n for n in graph.nodes if n.name.startswith("sin") and not n.users)
    graph.erase_node(more)
    next(iter(graph.nodes)).append(graph.call_function(operator.add, (1, 2)))
    graph.lint()


def test_copies_can_be_edited_alike(joint: remat.JointGraph) -> None:
    quick, plain = (copied(joint.graph, quick=q) for q in (True, False))
    before = outline(joint.graph)
    for graph in (quick, plain):
        edit(graph)
    assert outline(quick) == outline(plain)
    assert outline(joint.graph) == before


def test_copies_can_be_copied_and_pickled() -> None:
    x = torch.randn(3, 3)
    source = fx.symbolic_trace(lambda x: torch.cat([x.sin(), x * 2], dim=1))
    made = fx.GraphModule(source, copied(source.graph, quick=True))
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        again.graph.lint()
        assert torch.equal(again(x), source(x))


def test_a_name_that_is_taken_is_not_given_again(joint: remat.JointGraph) -> None:
    graph = fx.Graph()
    graph.create_node("call_function", torch.ops.aten.mm.default, (), name="mm")
    Copier(graph, joint.graph, quick=True).copy(joint.graph.nodes)
    graph.lint()
    before, after = calls(joint.graph), calls(graph)
    # Whose name is free keeps it.
    assert after == ["mm", *["mm_2" if name == "mm" else name for name in before]]


def test_names_that_are_made_up_later_are_new() -> None:
    source = traced(lambda x: x.sin().sin().sin(), torch.randn(2)).graph
    graph = fx.Graph()
    nodes = [n for n in source.nodes if n.name in ("x_1", "sin", "sin_1")]
    Copier(graph, source, quick=True).copy(nodes)
    later = graph.call_function(torch.ops.aten.sin.default, (graph.nodes.__iter__().__next__(),))
    assert later.name not in {n.name for n in source.nodes}


def test_an_untested_pytorch_copies_the_public_way(
    joint: remat.JointGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = remat.plan(joint, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0.0")
        patch.delattr(torch._C, "_fx_map_arg")  # a private part that the quick way needs is gone
        plan = remat.plan(joint, 0.5)
    plan = replace(plan, torch=wanted.torch)
    assert plan.to_json().replace(str(plan.solve_s), "") == wanted.to_json().replace(
        str(wanted.solve_s), ""
    )
    for mine, theirs in ((plan.forward, wanted.forward), (plan.backward, wanted.backward)):
        assert outline(mine.graph) == outline(theirs.graph)
