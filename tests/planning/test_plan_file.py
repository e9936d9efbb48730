"""A saved plan and another graph: the one reason why they do not go together."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError
from remat.planning.plan_file import plan_for


@cache
def captured(rows: int = 4) -> remat.JointGraph:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return remat.capture(model, (torch.randn(rows, 8),), lower="eager")


@pytest.fixture(scope="module")
def saved() -> dict[str, object]:
    plan: dict[str, object] = json.loads(remat.plan(captured()).to_json())
    return plan


def read(saved: dict[str, object], **other: object) -> remat.Plan:
    return remat.Plan.from_json(json.dumps({**saved, **other}))


def test_a_plan_says_what_it_was_made_under(saved: dict[str, object]) -> None:
    assert (saved["lower"], saved["torch"]) == ("eager", torch.__version__)


@pytest.mark.parametrize(
    ("other", "rows", "message"),
    [
        ({"lower": "inductor"}, 5, "made for the lowering 'inductor', .* lowered to 'eager'"),
        ({"torch": "2.9.1"}, 5, "made with PyTorch 2.9.1, and this is "),
        ({}, 5, "the same operators in the same order, so shapes, dtypes, constants or options"),
        ({"operators": "0" * 64}, 5, "other operators, so it is another model"),
    ],
)
def test_one_reason_is_named_and_no_other(
    saved: dict[str, object], other: dict[str, object], rows: int, message: str
) -> None:
    graph = captured(rows)
    plan = read(saved, **other)
    with pytest.raises(PlanError, match=message) as caught:
        remat.plan(graph, plan=plan)
    of_set = remat.PlanSet(plans=(plan,), passed_bytes=0, capacity=0)
    with pytest.raises(PlanError, match=message):
        plan_for(graph, of_set, fingerprint=graph.fingerprint)
    reasons = ("lowering", "PyTorch", "shapes", "another model")
    assert sum(reason in str(caught.value) for reason in reasons) == 1


def test_a_larger_model_with_nodes_of_the_same_names_is_another_model() -> None:
    def step(layers: int) -> remat.JointGraph:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)))
        return remat.capture(model, (torch.randn(4, 8),), lower="eager")

    small = remat.plan(step(2))
    large = step(3)
    names = {node.name for node in large.graph.nodes}
    assert names.issuperset((*small.saved, *small.recomputed))
    with pytest.raises(PlanError, match="other operators, so it is another model"):
        remat.plan(large, plan=small)
