"""Steps of which little or nothing is differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.graph.joint import output_node
from tests.graphs import traced
from tests.hard.steps import check, drawn, pair

T = torch.Tensor


def frozen_pair() -> tuple[T, T]:
    return drawn(6, 8, grad=False), drawn(8, 8, grad=False)


class Model(nn.Module):
    def __init__(self, trained: str | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.requires_grad_(False)
        if trained is not None:
            self.get_submodule(trained).weight.requires_grad_(True)  # type: ignore[union-attr, operator]

    def forward(self, x: T) -> T:
        y = F.dropout(self.norm(self.first(x)).relu(), 0.3)
        return self.last(y).exp()  # type: ignore[no-any-return]


def model(trained: str | None = None) -> Any:
    torch.manual_seed(0)
    return Model(trained), (drawn(6, 8, grad=False),)


def inference() -> Any:
    """It draws and mutates, too."""

    def f(x: T, w: T, b: T) -> T:
        b.add_(1)
        return F.dropout(torch.tanh(x @ w) * b, 0.5)

    return f, (*frozen_pair(), drawn(6, 8, grad=False))


def detached() -> Any:
    return (lambda x, w: torch.tanh(x @ w).detach().exp()), pair()


@pytest.mark.parametrize("make", [inference, detached, model])
def test_what_is_not_differentiated_is_not_planned(make: Any) -> None:
    check(make, plans=0)


@pytest.mark.parametrize("trained", ["first", "norm", "last"])
def test_one_parameter_is_trained(trained: str) -> None:
    check(lambda: model(trained), captured=trained == "norm")


def test_a_part_is_not_differentiated() -> None:
    def f(x: T, w: T) -> T:
        h = torch.tanh(x @ w)
        with torch.no_grad():
            scale = (h.exp() @ w.t()).sin().mean(0)
        return (h * scale).cos()

    least, *_ = check(lambda: (f, pair()))
    assert "mean" in least.recomputed


def test_some_inputs_get_no_gradient() -> None:
    def f(x: T, w: T, unused: T) -> T:
        return torch.tanh(x.detach() @ w)

    check(lambda: (f, (*pair(), drawn(4))))


def test_a_graph_without_a_backward_is_split_as_it_is() -> None:
    joint = traced(lambda x, w: (x @ w).sin(), *frozen_pair())
    graph = joint.graph_module
    for n in list(graph.graph.nodes)[:2]:
        n.meta["desc"] = None
    forward, backward = remat.partitioner(0)(graph, [None, None], num_fwd_outputs=1)
    assert [str(v) for v in output_node(forward.graph).args[0]] == ["sin"]  # type: ignore[union-attr]
    assert list(output_node(backward.graph).args[0]) == []  # type: ignore[arg-type]
