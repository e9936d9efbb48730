"""Common subexpressions: what is merged, and everything that must not be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.passes.core.state import State
from remat.passes.joint.cse import CommonSubexpressions, merge
from tests.graphs import calls, node, traced

X = torch.linspace(-1, 1, 9).view(3, 3)


def merged(f: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    joint = traced(f, *(args or (X,)))
    merge(joint.graph)
    joint.graph.lint()
    return calls(joint.graph)


def test_calls_with_the_same_arguments_become_one() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x.sin(), x.cos()) + 1
        b = torch.mm(x.sin(), x.cos()) + 1
        return torch.mul(a, b)

    joint = traced(f, X)
    assert len(calls(joint.graph)) == 9
    result = CommonSubexpressions().run(State(joint=joint))
    assert calls(joint.graph) == ["sin", "cos", "mm", "add", "mul"]
    assert (result.modified, result.detail) == (True, "4 nodes merged")
    again = CommonSubexpressions().run(result.state)
    assert (again.modified, again.state) == (False, result.state)
    joint.graph_module.recompile()
    assert torch.equal(joint.graph_module(X), f(X))


def test_keyword_and_list_arguments_count() -> None:
    def f(x: torch.Tensor) -> Any:
        return (
            x.sum([0]) + x.sum([1]) + x.sum([0]),
            torch.add(x, x, alpha=2) * torch.add(x, x, alpha=3) * torch.add(x, x, alpha=2),
        )

    names = merged(f)
    assert sum(n.startswith("sum") for n in names) == 2


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (2, 3, False),
        (2, 2, True),
        (math.nan, float("nan"), True),
        (torch.contiguous_format, torch.contiguous_format, True),
        (torch.contiguous_format, torch.preserve_format, False),
    ],
)
def test_arguments_are_told_apart_by_type_and_bits(a: Any, b: Any, same: bool) -> None:
    joint = traced(lambda x: torch.mul(x, 2) + torch.mul(x, 2), X)
    one, other = node(joint, "mul"), node(joint, "mul_1")
    one.args, other.args = (one.args[0], a), (one.args[0], b)
    assert merge(joint.graph) == same


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda x: torch.rand_like(x) + torch.rand_like(x), "rand_like"),
        (lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), "bernoulli"),
        # Uninitialised memory, which each call writes to.
        (lambda x: (torch.empty_like(x).fill_(1), torch.empty_like(x).fill_(2)), "empty_like"),
    ],
)
def test_calls_that_draw_or_allocate_are_never_merged(f: Callable[..., Any], name: str) -> None:
    assert sum(n.startswith(name) for n in merged(f)) == 2


def test_tags_and_regions_tell_calls_apart() -> None:
    def graph() -> tuple[remat.JointGraph, fx.Node]:
        joint = traced(lambda x: x.sin() + x.sin(), X)
        return joint, node(joint, "sin_1")

    joint, second = graph()
    second.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert merge(joint.graph) == 0
    joint, second = graph()
    second.meta["ac_graph_id"] = 3
    assert merge(joint.graph) == 0
    joint, second = graph()
    for n in (node(joint, "sin"), second):
        n.meta.update(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=3)
    assert merge(joint.graph) == 1


def test_nothing_is_merged_across_a_mutation() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        before = x.sin()
        x.add_(1)
        return before + x.sin()

    assert "sin_1" in merged(f, X.clone())


def test_what_shares_memory_with_an_output_stays() -> None:
    """Two outputs that the user may write to separately must not become one tensor."""
    assert merged(lambda x: (x.sin(), x.sin())) == ["sin", "sin_1"]
    assert merged(lambda x: (x.sin().t(), x.sin() + 1)) == ["sin", "t", "sin_1", "add"]
    # A value that no output looks at is merged all the same.
    assert merged(lambda x: (x.sin().exp(), x.sin().exp())) == ["sin", "exp", "exp_1"]


def test_views_of_merged_values_know_their_base() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().t() @ x) + (x.sin().view(9)[1:2])

    joint = traced(f, X)
    assert merge(joint.graph) == 1
    state = State(joint=joint)
    sin = state.index.by_name["sin"]
    for name in ("t", "view", "slice_1"):
        i = state.index.by_name[name]
        assert state.storages.owner[i] == sin, name


def test_unbacked_symbols_are_left_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    assert mode.shape_env is not None
    graph = fx.Graph()
    with mode:
        x = graph.placeholder("x_1")
        size = mode.shape_env.create_unbacked_symint()
        x.meta["val"] = torch.empty(size)
        found = []
        for _ in range(2):
            n = graph.call_function(torch.ops.aten.sin.default, (x,))
            n.meta["val"] = torch.sin(x.meta["val"])
            found.append(n)
        total = graph.call_function(torch.ops.aten.add.Tensor, tuple(found))
        total.meta["val"] = found[0].meta["val"] + 1
    graph.output((total,))
    assert merge(graph) == 0
