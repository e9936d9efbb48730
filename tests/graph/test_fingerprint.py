"""Fingerprints tell apart what plans differ in, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
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


CONSTANTS = (2, 1.0, True, "1", [1], (1,), None, torch.float32)
#: A node, and what makes another of it: a field and its new value.
CHANGES: list[tuple[str, str, Callable[[fx.Node], Any]]] = [
    *(("mul", "args", lambda n, c=c: (n.args[0], c)) for c in CONSTANTS),
    ("add", "args", lambda n: n.args[::-1]),
    ("add", "kwargs", lambda n: {"alpha": 3}),
    ("add", "kwargs", lambda n: {}),
    ("mul", "target", lambda n: torch.ops.aten.div.Tensor),
    ("mul", "meta", lambda n: {**n.meta, "recompute": CheckpointPolicy.MUST_SAVE}),
    ("x_1", "meta", lambda n: {**n.meta, "val": torch.empty(8)[::2]}),
    ("full", "meta", lambda n: {**n.meta, "val": torch.empty(3, dtype=torch.float64)}),
]


@pytest.mark.parametrize(("name", "field", "change"), CHANGES)
def test_what_counts(name: str, field: str, change: Callable[[fx.Node], Any]) -> None:
    joint = made()
    changed = node(joint, name)
    with changed.meta["val"].fake_mode:
        setattr(changed, field, change(changed))
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
