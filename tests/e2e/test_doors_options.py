"""The options of the backend: plans made, reused and listed, and what is wrong with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import remat
from tests.e2e.doors import Mlp, NewPlans, assert_same, compiled, stepped

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def test_plans_lists_what_compiled_models_run_on(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    stepped(mlp, compiled(mlp, 0.5, solver="greedy"), x)
    torch._dynamo.reset()
    stepped(mlp, compiled(mlp, "saved:1MiB", solver="dp", cost="flops"), x)
    first, second = new_plans()
    assert (first.budget, first.cost) == ("0.5", "roofline:epyc")
    assert (second.budget, second.cost, second.capacity) == ("saved:1048576B", "flops", 2**20)
    assert remat.plans()[-1] is second


def test_a_plan_is_reused_on_its_graph_only(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans, tmp_path: Path
) -> None:
    joint = remat.capture(mlp, (x,), lower="eager")
    plan = remat.plan(joint, 0.3, "greedy")
    reference = stepped(mlp, mlp, x)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    for given in (plan, plan.to_json(), path, str(path)):
        torch._dynamo.reset()
        assert_same(stepped(mlp, compiled(mlp, plan=given), x), reference)
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

    with config.patch(fallback_random=True):
        plan = remat.plan(remat.capture(mlp, (x,)), 0.3, "greedy")
    f = compiled(mlp, lower="inductor", plan=plan, fallback_random=True)
    for mine, theirs in zip(stepped(mlp, f, x), stepped(mlp, mlp, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert new_plans()[-1].saved == plan.saved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "8 bananas"}, "'bananas' is no unit of bytes"),
        ({"budget": 1.5}, "a ratio above 1"),
        ({"budget": "saved:2B"}, "must save at least"),
        ({"budget": 2}, "which is infeasible"),
        ({"solver": "gredy"}, "greedy"),
        ({"cost": "roofline:abacus"}, "abacus"),
        ({"lower": "sideways"}, "option 'lower' is 'sideways'"),
        ({"plan": "{"}, "not a saved plan"),
        ({"plan": "/nowhere/plan.json"}, "cannot be read"),
        ({"time_limit": -1}, "time_limit"),
        ({"no_such_option": 1}, "known to neither remat .* nor Inductor"),
        ({"no_such_option": 1, "lower": "inductor"}, "known to neither remat .* nor Inductor"),
        ({"max_autotune": True}, "does not use Inductor"),
        ({"bugdet": 0.5}, "did you mean 'budget'"),
        ({"bugdet": 0.5, "lower": "inductor"}, "did you mean 'budget'"),
        ({"max-autotun": True, "lower": "inductor"}, "did you mean 'max_autotune'"),
    ],
)
def test_bad_options_say_what_is_wrong(
    mlp: Mlp, x: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(mlp, **options)(x)
    assert isinstance(caught.value.inner_exception, remat.RematError)


def test_inductor_options_pass_through(mlp: Mlp, x: torch.Tensor) -> None:
    from torch._inductor import config

    seen: list[bool] = []

    def look(graph: Any) -> None:
        seen.append(config.fallback_random)

    f = compiled(
        mlp.eval(), lower="inductor", fallback_random=True, **{"post-grad-custom-post-pass": look}
    )
    f(x).sum().backward()
    assert seen == [True, True]
    assert not config.fallback_random
