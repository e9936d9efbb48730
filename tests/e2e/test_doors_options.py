"""The backend's entry point: options, plans made and reused, and what users switch on around a model."""

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


def test_a_plan_is_reused_on_its_graph_only(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans, tmp_path: Path
) -> None:
    joint = remat.capture(mlp, (x,), lower="eager")
    plan = remat.plan(joint, 0.3, "greedy")
    reference = step(mlp, (x,), mlp)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    for given in (plan, str(path)):
        torch._dynamo.reset()
        assert_same(step(compiled(mlp, plan=given), (x,), mlp), reference, 0.0)
    assert len(new_plans()) == 2
    assert {p.decision for p in new_plans()} == {plan.decision}
    assert {(p.budget, p.saved_bytes) for p in new_plans()} == {("0.3", plan.saved_bytes)}
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="this plan is for graph 'Mlp'") as caught:
        compiled(mlp, plan=plan.to_json())(x[:64])
    assert isinstance(caught.value.inner_exception, remat.RematError)
    assert len(new_plans()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "/nowhere/plan.json"}, "cannot be read"),
        ({"no_such_option": 1}, "known to neither remat .* nor Inductor"),
        ({"max-autotun": True, "lower": "inductor"}, "did you mean 'max_autotune'"),
        (
            {"max-autotune": "x", "lower": "inductor"},
            "option 'max-autotune' of Inductor is 'x'; expected True or False",
        ),
    ],
)
def test_bad_options_say_what_is_wrong(
    mlp: Mlp, x: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(mlp, **options)(x)
    assert isinstance(caught.value.inner_exception, remat.RematError)


def test_autocast(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    def cast(f: Any) -> dict[str, Any]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return f(x).square().mean()  # type: ignore[no-any-return]

        torch._dynamo.reset()
        return step(loss, (x,), mlp)

    full, least = (cast(compiled(mlp, budget=budget)) for budget in (1, 0))
    assert_same(least, full, 0.0)
    assert len(new_plans()) == 2
    assert new_plans()[-1].recomputed
    for name, value in cast(mlp).items():
        torch.testing.assert_close(least[name], value, rtol=2e-2, atol=1e-3)


def test_a_step_without_gradients_is_not_planned(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    with torch.no_grad():
        assert_same(step(compiled(mlp, budget=0), (x,), mlp), step(mlp, (x,), mlp), 0.0)
    assert new_plans() == ()
