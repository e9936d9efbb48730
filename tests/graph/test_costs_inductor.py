"""What nodes cost in the kernels that Inductor itself would form, and the default cost model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import ProblemError
from remat.graph.costs import Inductor, RooflineFused, inductor
from remat.graph.costs.inductor import kernels_of
from tests.graph.pricing import costs
from tests.graph.test_costs_fused import SQUARE, moving, square
from tests.graphs import joint_of, traced


def test_what_is_computed_in_one_kernel_moves_nothing_between() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin().cos().exp() @ w).relu().neg()

    joint = traced(f, square(), square())
    kernels = kernels_of(joint.graph)
    assert kernels is not None
    assert kernels["sin"] == kernels["cos"] == kernels["exp"]
    assert len({kernels["exp"], kernels["mm"], kernels["neg"]}) == 3
    found = costs(joint, Inductor())
    assert found["exp"] == moving(SQUARE), "writes what the product reads"
    assert found["mm"] == moving(3 * SQUARE), "a product moves everything"
    assert found["neg"] == moving(SQUARE), "writes the result"


def test_kernels_are_asked_for_again_where_arguments_or_sizes_are_others() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sin, cos = x.sin(), w.cos()
        return (sin @ w) + cos

    joint = traced(f, square(), square())
    graph = joint.graph
    before = kernels_of(graph)
    assert before is not None
    assert kernels_of(graph) is before
    assert before["cos"] == before["add"] != before["mm"]
    nodes = {n.name: n for n in graph.nodes}
    nodes["add"].args = (nodes["mm"], nodes["sin"])
    nodes["mm"].args = (nodes["cos"], nodes["mm"].args[1])
    graph.lint()
    after = kernels_of(graph)
    assert after is not None
    assert after["sin"] == after["add"] != after["cos"]
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["val"] = value[:4, :4]
    assert kernels_of(graph) is not after


def test_who_saves_what_would_stay_in_registers_pays_for_it() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + y).sin() * y).sum()

    joint = traced(f, square(), square())
    added = costs(joint, Inductor())["add"]
    assert added == 1, "reading both inputs takes no longer than writing and reading the sum"
    assert costs(joint, RooflineFused())["add"] == moving(2 * SQUARE)


def test_a_graph_that_inductor_does_not_lower_is_priced_as_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(module: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(inductor, "_written_by", refuse)
    joint = joint_of(lambda x, y: (x.sin() @ y).relu(), square().requires_grad_(), square())
    plan = remat.plan(joint, 0.5, cost="inductor")
    assert plan.recompute_cost == remat.plan(joint, 0.5, cost="roofline-fused").recompute_cost
    assert "roofline-fused" in plan.fallbacks[0]


@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_the_default_is_that_of_the_lowering(lower: Any) -> None:
    joint = remat.capture(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),), lower=lower
    )
    kind = {"inductor": "roofline-fused", "eager": "roofline"}[lower]
    plan = remat.plan(joint, 0.5)
    assert plan.cost == f"{kind}:epyc"
    assert f"cost model {kind}:epyc" in plan.explain()
    assert remat.compare(joint, ("greedy",), (0.5,)).cost == plan.cost
    assert remat.frontier(joint).cost == plan.cost
    by_pipeline = remat.plan(joint, pipeline=remat.default_pipeline(0.5))
    assert (by_pipeline.cost, by_pipeline.recompute_cost) == (
        plan.cost,
        plan.recompute_cost,
    )


def test_a_step_that_is_compiled_is_priced_for_where_it_runs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled: Any = torch.compile(model, backend="remat", options={"lower": "eager"})
    compiled(torch.randn(4, 8)).sum().backward()
    assert remat.plans()[-1].cost == "roofline:epyc"


def test_a_device_is_named_to_the_model_that_knows_devices() -> None:
    with pytest.raises(ProblemError, match="'roofline-fused:h200' may name another"):
        remat.plan(joint_of(torch.sin, square().requires_grad_()), cost="auto:h200")
    assert Inductor.parse("a100").device is RooflineFused.parse("a100").device
