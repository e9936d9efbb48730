"""Stamps: what counts as a change of a graph, and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from remat.graph.capture.snapshot import Stamp

sin, add = torch.ops.aten.sin.default, torch.ops.aten.add.Tensor


def graph() -> fx.Graph:
    made = fx.Graph()
    x = made.placeholder("x")
    y = made.call_function(sin, (x,))
    z = made.call_function(add, (y, math.nan), {"alpha": 2})
    made.output((z,))
    return made


def node(of: fx.Graph, at: int) -> fx.Node:
    return list(of.nodes)[at]


def put(of: fx.Graph, at: int, **fields: Any) -> None:
    for field, value in fields.items():
        setattr(node(of, at), field, value)


cos = torch.ops.aten.cos.default


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda of: node(of, 1).meta.update(recompute="must_save"),
            "the recompute tag of 'sin_default' was None, is must_save now",
        ),
        (
            lambda of: put(of, 1, target=cos),
            "the target of 'sin_default' was aten.sin.default, is aten.cos.default now",
        ),
        (
            lambda of: node(of, 1)._rename("other"),
            "the name of 'sin_default' was sin_default, is other now",
        ),
        (
            lambda of: put(of, 2, args=(node(of, 0), math.nan)),
            "the arguments of 'add_tensor' was (sin_default, nan), is (x, nan) now",
        ),
        (
            lambda of: put(of, 2, kwargs={"alpha": 2.0}),
            "the keyword arguments of 'add_tensor' was {'alpha': 2}, is {'alpha': 2.0} now",
        ),
        (lambda of: of.call_function(sin, (node(of, 0),)), "it has 1 nodes more"),
        (
            lambda of: node(of, 2).append(node(of, 1)),
            "'sin_default' stood where 'add_tensor' stands now",
        ),
        (lambda of: of.erase_node(node(of, 3)), "it has 1 nodes fewer"),
        (lambda of: None, None),
        (lambda of: put(of, 2, args=(node(of, 1), float("nan"))), None),
        (lambda of: node(of, 1).meta.update(seq_nr=3), None),
    ],
)
def test_a_change_is_told(change: Callable[[fx.Graph], None], says: str | None) -> None:
    of = graph()
    before = Stamp.of(of)
    change(of)
    assert before.difference(Stamp.of(of)) == says
