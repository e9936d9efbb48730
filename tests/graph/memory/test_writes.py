"""What a call writes to, and whose memory it hands back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from remat.graph.memory.writes import aliased_argument, is_destination, written_by

aten = torch.ops.aten


@pytest.fixture
def inputs() -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(name) for name in "abc"]


def called(inputs: list[fx.Node], target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return inputs[0].graph.call_function(target, args, kwargs)


Case = tuple[Callable[..., fx.Node], str, str | None]
CASES: dict[str, Case] = {
    "mul_": (lambda i: called(i, aten.mul_.Tensor, i[0], i[1]), "a", "a"),
    "copy_": (lambda i: called(i, aten.copy_.default, i[0], i[1]), "a", "a"),
    "index_put_": (lambda i: called(i, aten.index_put_.default, i[0], [i[1]], i[2]), "a", "a"),
    "set_": (lambda i: called(i, aten.set_.source_Tensor, i[0], i[1]), "a", "b"),
    "set_ to nothing": (lambda i: called(i, aten.set_.default, i[0]), "a", None),
    "out": (lambda i: called(i, aten.sin.out, i[0], out=i[1]), "b", "b"),
    "several outs": (
        lambda i: called(i, aten.var_mean.correction_out, i[0], out0=i[1], out1=i[2]),
        "bc",
        None,
    ),
    "_foreach_mul_": (
        lambda i: called(i, aten._foreach_mul_.Scalar, [i[0], i[1]], 2.0),
        "ab",
        None,
    ),
    "_foreach_add_": (
        lambda i: called(i, aten._foreach_add_.List, [i[0]], [i[1]]),
        "a",
        None,
    ),
    "a view": (lambda i: called(i, aten.t.default, i[0]), "", "a"),
    "a sum": (lambda i: called(i, aten.add.Tensor, i[0], i[1]), "", None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_by_schema(inputs: list[fx.Node], case: Case) -> None:
    made, written, base = case
    node = made(inputs)
    assert "".join(n.name for n in written_by(node)) == written
    assert [n.name for n in inputs if is_destination(n, node)] == list(written)
    aliased = aliased_argument(node)
    assert (aliased and aliased.name) == base
