"""What is known of operators by name."""

from __future__ import annotations

import torch
from torch import fx

from remat.graph import ops
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
