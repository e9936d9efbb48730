"""Stamps: what counts as a change of a graph, and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from remat.graph.snapshot import Stamp

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


def retag(of: fx.Graph) -> None:
    node(of, 1).meta["recompute"] = "must_save"


def retarget(of: fx.Graph) -> None:
    node(of, 1).target = torch.ops.aten.cos.default


def rename(of: fx.Graph) -> None:
    node(of, 1)._rename("other")


def reread(of: fx.Graph) -> None:
    node(of, 2).args = (node(of, 0), math.nan)


def retype(of: fx.Graph) -> None:
    node(of, 2).kwargs = {"alpha": 2.0}


def insert(of: fx.Graph) -> None:
    with of.inserting_before(node(of, 3)):
        of.call_function(sin, (node(of, 0),))


def append(of: fx.Graph) -> None:
    of.call_function(sin, (node(of, 0),))


def move(of: fx.Graph) -> None:
    node(of, 2).append(node(of, 1))


def erase(of: fx.Graph) -> None:
    of.erase_node(node(of, 3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (retag, "the recompute tag of 'sin_default' was None, is must_save now"),
        (retarget, "the target of 'sin_default' was aten.sin.default, is aten.cos.default now"),
        (rename, "the name of 'sin_default' was sin_default, is other now"),
        (reread, "the arguments of 'add_tensor' was (sin_default, nan), is (x, nan) now"),
        (retype, "the keyword arguments of 'add_tensor' was {'alpha': 2}, is {'alpha': 2.0} now"),
        (insert, "'output' stood where 'sin_default_1' stands now"),
        (append, "it has 1 nodes more"),
        (move, "'sin_default' stood where 'add_tensor' stands now"),
        (erase, "it has 1 nodes fewer"),
    ],
)
def test_a_change_is_told(change: Callable[[fx.Graph], None], says: str) -> None:
    of = graph()
    before = Stamp.of(of)
    change(of)
    assert before.difference(Stamp.of(of)) == says


def same_arguments(of: fx.Graph) -> None:
    node(of, 2).args = (node(of, 1), float("nan"))


def other_meta(of: fx.Graph) -> None:
    node(of, 1).meta["seq_nr"] = 3


@pytest.mark.parametrize("change", [lambda of: None, same_arguments, other_meta])
def test_what_is_no_change(change: Callable[[Any], None]) -> None:
    of = graph()
    before = Stamp.of(of)
    change(of)
    assert before.difference(Stamp.of(of)) is None


def test_a_copy_is_another_graph() -> None:
    assert Stamp.of(graph()).difference(Stamp.of(graph())) == "'x' stood where 'x' stands now"
