"""The text of a plan, and edited plan files."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest

from remat.errors import PlanError
from remat.sac import SACPlan
from tests.sac.planned import Stack, plan_for, sac_plan

LAYERS = ("layers.0", "layers.1")


@functools.cache
def a_plan() -> SACPlan:
    return plan_for(Stack, LAYERS, (4, 8))


def test_what_it_says() -> None:
    plan = replace(
        a_plan(), solver="cbc", mode="operator-level-cost-model", world_size=2, peak_bytes=5000
    )
    first = plan.modules[0]
    text = plan.explain()
    assert "checkpointing plan for a budget of 4 KiB" in text
    assert "more than the budget, instead of 8 KiB without checkpointing" in text
    assert "10.5 ms estimated, 5.0% more than the 10 ms without checkpointing" in text
    assert "0.5 ms; no plan that fits needs less than 0.5 ms" in text
    assert "decided by  cbc, operator-level-cost-model, over 2 ranks" in text
    assert f"'layers.0' … 'layers.1' (2)  {first.stored_bytes} B" in text
    assert f"{len(first.stored)} of {len(first.ops)}: " in text
    assert "those of each" in text


def test_modules_that_differ_are_rows_of_their_own() -> None:
    a, b = a_plan().modules
    text = sac_plan(a, replace(b, recompute_ms=3.0)).explain()
    assert "'layers.0'  " in text
    assert "'layers.1'  " in text
    assert "3 ms" in text
    assert "those of each" not in text
    assert "no module is checkpointed" in sac_plan().explain()


@pytest.mark.parametrize("value", [-1, float("nan"), 10**400])
def test_figures_that_cannot_be_are_refused(value: float) -> None:
    data = json.loads(a_plan().to_json())
    for name in ("stored_bytes", "discarded_bytes", "recompute_ms"):
        module = {**data["modules"][0], name: value}
        with pytest.raises(PlanError, match=name):
            SACPlan.from_json(json.dumps({**data, "modules": [module]}))
    numbers = ("budget_bytes", "peak_bytes", "plain_peak_bytes")
    for name in (*numbers, "recompute_ms", "step_ms", "bound_ms"):
        with pytest.raises(PlanError, match=name):
            SACPlan.from_json(json.dumps({**data, name: value}))
    with pytest.raises(PlanError, match="world_size is 0, expected 1 or more ranks"):
        SACPlan.from_json(json.dumps({**data, "world_size": 0}))
