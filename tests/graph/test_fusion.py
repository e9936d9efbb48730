"""Rules of fusion: what one kernel computes."""

from __future__ import annotations

import torch

from remat.graph.fusion import absorbed_inputs, may_fuse, producer_of, readers_of
from tests.graphs import node, traced


def test_a_concatenation_absorbs_its_inputs_and_a_product_none() -> None:
    joint = traced(lambda x: torch.cat([x.sin(), x.cos()]) @ x, torch.ones(2, 2))
    assert [n.name for n in absorbed_inputs(node(joint, "cat"))] == ["sin", "cos"]
    assert absorbed_inputs(node(joint, "mm")) == []


def test_views_pass_values_on() -> None:
    joint = traced(lambda x: x.sin().view(4).exp(), torch.ones(2, 2))
    assert producer_of(node(joint, "view")) is node(joint, "sin")
    assert list(readers_of(node(joint, "sin"))) == [node(joint, "exp")]


def test_products_never_fuse() -> None:
    joint = traced(lambda x: (x @ x).sin(), torch.ones(2, 2))
    assert may_fuse(node(joint, "sin"))
    assert not may_fuse(node(joint, "mm"))
