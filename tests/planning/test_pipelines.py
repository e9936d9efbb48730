"""Pipelines of the caller's own: printed, edited, handed to the planner and to the compiler."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import PlanError, ProblemError
from tests.graphs import calls, joint_of, traced, weight
from tests.hard.steps import assert_same, compiled, drawn, step


@cache
def joint() -> remat.JointGraph:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x @ w)
        return x.sum()

    return joint_of(f, weight(64, 64), weight(64, 64))


@pytest.mark.parametrize(
    ("budget", "solver"), [(0, "greedy"), (0.3, "auto"), ("saved:40000B", "auto"), (1.0, "greedy")]
)
def test_the_default_pipeline_is_what_plan_runs(budget: Any, solver: str) -> None:
    text = str(remat.default_pipeline(budget, solver))
    assert text.startswith("dce,cse,")
    mine, same = remat.plan(joint(), pipeline=text), remat.plan(joint(), budget, solver)
    for name in ("saved", "recomputed", "saved_bytes", "peak_bytes", "recompute_cost", "budget"):
        assert getattr(mine, name) == getattr(same, name), name
    assert calls(mine.backward) == calls(same.backward)


def test_an_edited_pipeline_is_obeyed() -> None:
    text = str(remat.default_pipeline(0.0)).replace("reorder-backward,", "")
    plain, edited = remat.plan(joint(), 0.0), remat.plan(joint(), pipeline=text)
    assert edited.saved == plain.saved
    assert calls(edited.backward) != calls(plain.backward)
    assert sorted(calls(edited.backward)) == sorted(calls(plain.backward))


def test_a_pipeline_without_a_decision_keeps_what_the_user_wrote() -> None:
    graph = joint()
    before = graph.fingerprint
    plan = remat.plan(graph, pipeline="fixpoint(dce,cse),partition")
    assert plan.recomputed == ()
    assert plan.budget == "1"
    assert graph.fingerprint == before


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("dce,min-cut", "does not partition: put 'partition' behind"),
        (3, "pipeline is a int; expected text, for example 'dce,cse,"),
        ("dce,partitoin", "did you mean 'partition'"),
    ],
)
def test_pipelines_that_cannot_be_meant(pipeline: object, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        remat.plan(joint(), pipeline=pipeline)  # type: ignore[call-overload]
    with pytest.raises(ProblemError, match=message):
        remat.partitioner(pipeline=pipeline)  # type: ignore[arg-type]


def test_what_no_pipeline_does_is_refused() -> None:
    with pytest.raises(ProblemError, match="searched for over many plans"):
        remat.default_pipeline(remat.Peak("1GiB"))
    with pytest.raises(ProblemError, match="several graphs"):
        remat.plan([joint()], pipeline="partition")  # type: ignore[call-overload]


def test_nothing_to_differentiate() -> None:
    with pytest.raises(PlanError, match="has no tangents"):
        remat.plan(traced(lambda x: x.sin(), torch.randn(3)), pipeline="dce,partition")


def test_a_compiled_model_runs_on_a_pipeline() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
    torch._dynamo.reset()
    run = compiled(model, pipeline=str(remat.default_pipeline(0.0, "greedy")))
    assert_same(step(run, (drawn(4, 8),), model), step(model, (drawn(4, 8),), model), 0.0)
    assert remat.plans()[-1].budget == "0"
