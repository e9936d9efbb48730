"""The options of the backend: plans made, reused and listed, and what is wrong with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import remat
from tests.e2e.doors import Mlp, NewPlans
from tests.hard.steps import assert_same, compiled, step


def test_plans_lists_what_compiled_models_run_on(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    step(compiled(mlp, budget=0.5, solver="greedy"), (x,), mlp)
    torch._dynamo.reset()
    step(compiled(mlp, budget="saved:1MiB", solver="dp", cost="flops"), (x,), mlp)
    first, second = new_plans()
    assert (first.budget, first.cost) == ("0.5", "roofline:epyc")
    assert (second.budget, second.cost, second.capacity) == ("saved:1048576B", "flops", 2**20)
    assert remat.plans()[-1] is second


def test_a_plan_is_reused_on_its_graph_only(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans, tmp_path: Path
) -> None:
    joint = remat.capture(mlp, (x,), lower="eager")
    plan = remat.plan(joint, 0.3, "greedy")
    reference = step(mlp, (x,), mlp)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    for given in (plan, plan.to_json(), path, str(path)):
        torch._dynamo.reset()
        assert_same(step(compiled(mlp, plan=given), (x,), mlp), reference, 0.0)
    assert len(new_plans()) == 4
    assert {p.decision for p in new_plans()} == {plan.decision}
    assert {(p.budget, p.saved_bytes) for p in new_plans()} == {("0.3", plan.saved_bytes)}
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="this plan is for graph 'Mlp'") as caught:
        compiled(mlp, plan=plan.to_json())(x[:64])
    assert isinstance(caught.value.inner_exception, remat.RematError)
    assert len(new_plans()) == 4


def test_a_plan_captured_for_inductor_fits_what_inductor_compiles(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    from torch._inductor import config

    mlp.layers = mlp.layers[:2]
    with config.patch(fallback_random=True):
        plan = remat.plan(remat.capture(mlp, (x,)), 0.3, "greedy")
    f = compiled(mlp, lower="inductor", plan=plan)
    assert_same(step(f, (x,), mlp), step(mlp, (x,), mlp), 1e-4)
    assert new_plans()[-1].saved == plan.saved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1.5}, "a ratio above 1"),
        ({"budget": "saved:2B"}, "must save at least"),
        ({"budget": 2}, "which is infeasible"),
        ({"plan": "{"}, "not a saved plan"),
        ({"plan": "/nowhere/plan.json"}, "cannot be read"),
        ({"no_such_option": 1}, "known to neither remat .* nor Inductor"),
        ({"no_such_option": 1, "lower": "inductor"}, "known to neither remat .* nor Inductor"),
        ({"max-autotun": True, "lower": "inductor"}, "did you mean 'max_autotune'"),
    ],
)
def test_bad_options_say_what_is_wrong(
    mlp: Mlp, x: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(mlp, **options)(x)
    assert isinstance(caught.value.inner_exception, remat.RematError)
