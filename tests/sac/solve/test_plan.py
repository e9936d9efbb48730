"""Plans for people: the table, and the code to paste."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from remat.sac import SACPlan
from tests.sac.planned import Block, Stack, all_equal, gradients, plan_for, sac_plan

LAYERS = ("layers.0", "layers.1")


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


def test_the_code_makes_the_same_plan_and_applies_it() -> None:
    plan = a_plan()
    torch.manual_seed(0)
    model, x = Stack(), torch.linspace(-1, 1, 32).view(4, 8)
    wanted = gradients(model, x)
    runs: list[int] = []
    layer = model.layers[0]
    assert isinstance(layer, Block)
    layer.up.register_forward_pre_hook(lambda *_: runs.append(1))
    text = plan.code()
    found: dict[str, Any] = {"model": model}
    exec(compile(text, "pasted", "exec"), found)
    assert found["plan"] == plan
    assert all_equal(gradients(model, x), wanted)
    assert len(runs) == 2
    assert text.count("aten.native_layer_norm.default") == 1, "alike modules are written once"
    assert max(map(len, text.splitlines())) <= 100


def test_code_of_small_and_empty_plans() -> None:
    (one, *_) = a_plan().modules
    for plan in (sac_plan(), sac_plan(replace(one, ops=("aten.sin.default",), stored=(0,)))):
        text = plan.code().replace("apply(model, plan)", "")
        found: dict[str, Any] = {}
        exec(compile(text, "pasted", "exec"), found)
        assert found["plan"] == plan
