"""Fingerprints tell apart what plans differ in, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import remat
from tests.graphs import node, traced


def step(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = torch.add(x, y, alpha=2) * 1
    return z.view(2, 2).sum(), torch.full((3,), 0.5)


def made(f: Callable[..., Any] = step, *args: torch.Tensor) -> remat.JointGraph:
    return traced(f, *(args or (torch.ones(4), torch.ones(4))))


def test_the_same_graph_has_the_same_fingerprint() -> None:
    assert made().fingerprint == made().fingerprint == made().copy().fingerprint


def test_names_do_not_count() -> None:
    joint = made()
    node(joint, "mul")._rename("product")
    assert joint.fingerprint == made().fingerprint


def changed(name: str, **fields: Any) -> str:
    """The fingerprint where a node has other fields, or another fake value."""
    joint = made()
    found = node(joint, name)
    for field, value in fields.items():
        if field == "val":
            with found.meta["val"].fake_mode:
                found.meta["val"] = value()
        else:
            setattr(found, field, value)
    return joint.fingerprint


@pytest.mark.parametrize("constant", [2, 1.0, True, "1", [1], (1,), None, torch.float32], ids=repr)
def test_constants_count_with_their_types(constant: Any) -> None:
    joint = made()
    mul = node(joint, "mul")
    mul.args = (mul.args[0], constant)
    assert joint.fingerprint != made().fingerprint


def test_a_node_is_no_constant_of_its_position() -> None:
    digests = set()
    for use in ("node", 0, 1):
        joint = made()
        mul = node(joint, "mul")
        first = next(iter(joint.graph.nodes))
        mul.args = (mul.args[0], first if use == "node" else use)
        digests.add(joint.fingerprint)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("add", {"kwargs": {"alpha": 3}}),
        ("add", {"kwargs": {}}),
        ("mul", {"target": torch.ops.aten.div.Tensor}),
        ("mul", {"meta": {"recompute": CheckpointPolicy.MUST_SAVE}}),
        ("x_1", {"val": lambda: torch.empty(8)[::2]}),
        ("full", {"val": lambda: torch.empty(3, dtype=torch.float64)}),
    ],
)
def test_what_else_counts(name: str, fields: dict[str, Any]) -> None:
    assert changed(name, **fields) != made().fingerprint


def test_edges_count() -> None:
    joint = made()
    add = node(joint, "add")
    add.args = add.args[::-1]
    assert joint.fingerprint != made().fingerprint


def test_what_forward_returns_counts() -> None:
    module = made().graph_module
    one, two = (remat.JointGraph(graph_module=module, num_fwd_outputs=n) for n in (1, 2))
    assert one.fingerprint != two.fingerprint


def test_symbolic_sizes_are_written() -> None:
    def joint(mode: str) -> remat.JointGraph:
        module = make_fx(lambda x: torch.cat([x, x]).sin(), tracing_mode=mode)(torch.ones(4, 3))
        return remat.JointGraph(graph_module=module, num_fwd_outputs=1)

    dynamic = joint("symbolic")
    assert dynamic.fingerprint == joint("symbolic").fingerprint == dynamic.copy().fingerprint
    assert dynamic.fingerprint != joint("fake").fingerprint


def test_a_symbol_that_a_guard_made_a_number_counts_as_the_number() -> None:
    """A graph that is read from text has the number alone."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        assert y.shape == (4, 3)  # a guard
        return y.cos()

    module = make_fx(f, tracing_mode="symbolic")(torch.ones(4, 3))
    joint = remat.JointGraph(graph_module=module, num_fwd_outputs=1)
    sine = node(joint, "sin").meta["val"]
    with sine.fake_mode:
        number = torch.empty(4, 3)
    assert sine._has_symbolic_sizes_strides
    before = joint.fingerprint
    node(joint, "sin").meta["val"] = number
    assert joint.fingerprint == before
