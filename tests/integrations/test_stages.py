"""Stages of a compilation: each has what the stage before has found, whatever else happens meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import remat
from remat.integrations.budget_loop import restore
from remat.integrations.compiled_budget import compiled_bytes
from remat.integrations.partitioner import Partitioner
from remat.integrations.plan_cache import CachedPlan
from remat.integrations.stages import Arrived, Planned


@pytest.fixture(scope="module")
def plan() -> remat.Plan:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    joint = remat.capture(model, (torch.randn(64, 16),), lower="inductor")
    return remat.plan(joint, remat.Peak("1MiB"))


def arrived(options: Partitioner) -> Arrived:
    return Arrived(options=options, earlier=frozenset(options.graphs.planned), watched=True)


def test_only_a_later_compilation_of_the_same_code_runs_above_its_budget(plan: remat.Plan) -> None:
    """A second attempt at the same compilation does not: the step has not run yet."""
    options = Partitioner(budget=remat.Peak("1MiB"))
    first = arrived(options)
    Planned(arrived=first, plan=plan, request=options.request, kind="code 0").recorded()
    assert not first.runs_anyway("code 0")
    second = arrived(options)
    assert second.runs_anyway("code 0")
    assert not second.runs_anyway("code 1")
    assert not second.runs_anyway(""), "outside of Dynamo nobody knows which code is compiled"


@pytest.mark.parametrize("strict", [False, True])
def test_an_inference_above_its_budget_runs_unless_strict(strict: bool) -> None:
    options = Partitioner(budget=remat.Peak("1MiB"), strict=strict)
    alone = replace(arrived(options), is_alone=True)
    assert alone.runs_anyway("code 0") is not strict
    assert not replace(alone, runs_backward=True).runs_anyway("code 0")


def test_a_step_from_a_cache_is_held_to_what_the_other_graphs_leave(plan: remat.Plan) -> None:
    """As a planned step is: its compiled peak counts against the part of the budget that is left."""
    options = Partitioner(budget=remat.Peak("1MiB"))
    other = replace(
        arrived(options), other_graphs_runs=1, other_graphs_bytes=2**20 - 4096, is_part=True
    )
    record = CachedPlan(plan=plan.to_json())
    planned = restore(other, torch.fx.symbolic_trace(nn.Tanh()), record)
    assert planned.request.of_several
    made = replace(planned.plan, planned_peak_bytes=planned.plan.peak_bytes)
    assert compiled_bytes(made, planned.request) == (made.peak_bytes, 4096)
