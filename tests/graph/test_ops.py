"""What is known of operators by name, and the memory behind fake values."""

from __future__ import annotations

import gc

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from remat.graph import ops
from remat.graph.memory.storages import Memories
from remat.graph.purity import overload_named


def test_what_looks_at_shapes_only() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    looks = {
        target: not ops.ignores_content(graph.call_function(target, (x,)))
        for target in (aten.rand_like.default, aten.uniform.default, aten.sin.default)
    }
    assert list(looks.values()) == [False, False, True]


def test_an_overload_is_found_by_its_own_name() -> None:
    aten = torch.ops.aten
    for overload in (aten.add.Tensor, aten.add.Scalar, aten.mm.default):
        assert overload_named(overload.name()) is overload


def test_views_share_a_memory() -> None:
    memories = Memories()
    with FakeTensorMode():
        x = torch.empty(4, 4)
        view, other = x[1:].t(), torch.empty(4, 4)
    assert memories.key(x) == memories.key(view) is not None
    assert memories.key(x) != memories.key(other)
    assert memories.of(view)[1].nbytes() == 64  # type: ignore[union-attr]
    assert [m[0] for m in memories.of_all([x, view])] == [memories.key(x)] * 2


def test_what_has_no_memory() -> None:
    memories = Memories()
    sparse = torch.eye(3).to_sparse()
    assert [m[:2] for m in memories.of_all([None, 3, (torch.ones(1),), sparse])] == [
        (None, None)
    ] * 4


def test_a_value_that_was_asked_for_is_never_mistaken_for_another() -> None:
    memories, seen = Memories(), set()
    for _ in range(100):
        value = torch.empty(1)
        seen.add(memories.key(value))
        del value
        gc.collect(0)
    assert len(seen) == 100  # the values live on, and so do their memories
