"""The doors into torch.compile: what users switch on around a model works as it does without us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from tests.e2e.doors import Mlp, NewPlans
from tests.hard.steps import assert_same, compiled, step

T = torch.Tensor


def test_autocast(mlp: Mlp, x: T, new_plans: NewPlans) -> None:
    def cast(f: Callable[[T], T]) -> dict[str, Any]:
        def loss(x: T) -> T:
            with torch.autocast("cpu", torch.bfloat16):
                return f(x).square().mean()

        torch._dynamo.reset()
        return step(loss, (x,), mlp)

    full, least = (cast(compiled(mlp, budget=budget)) for budget in (1, 0))
    assert_same(least, full, 0.0)
    assert len(new_plans()) == 2
    assert new_plans()[-1].recomputed
    for name, value in cast(mlp).items():
        torch.testing.assert_close(least[name], value, rtol=2e-2, atol=1e-3)


def test_no_grad_and_frozen_models_are_not_planned(mlp: Mlp, x: T, new_plans: NewPlans) -> None:
    f = compiled(mlp, budget=0)
    with torch.no_grad():
        assert_same(step(f, (x,), mlp), step(mlp, (x,), mlp), 0.0)
    mlp.requires_grad_(False)
    assert_same(step(f, (x,), mlp), step(mlp, (x,), mlp), 0.0)
    mlp.eval()
    assert_same(step(f, (x,), mlp), step(mlp, (x,), mlp), 0.0)
    assert new_plans() == ()


def test_eval_with_gradients_is_planned_without_dropout(
    mlp: Mlp, x: T, new_plans: NewPlans
) -> None:
    mlp.eval()
    assert_same(step(compiled(mlp, budget=0), (x,), mlp), step(mlp, (x,), mlp), 0.0)
    (plan,) = new_plans()
    assert not any("dropout" in name for name in plan.recomputed)


@dataclass
class Answer:
    hidden: T
    extra: dict[str, Any]


class Pair(NamedTuple):
    a: T
    b: list[T | int | None]


@pytest.mark.parametrize("shape", ["dict", "dataclass", "nested"])
def test_outputs_of_any_shape(shape: str, x: T) -> None:
    class Shaped(Mlp):
        def forward(self, x: T) -> Any:
            h = super().forward(x)
            if shape == "dict":
                return {"h": h, "view": h[:2].T, "input": x, "n": 3}
            if shape == "dataclass":
                return Answer(hidden=h, extra={"mean": h.mean(), "none": None})
            return Pair(h, [h.detach() * 2, 7, None, (h + 1).sum(0)]), {"deep": [(h.cos(),)]}

    def flat(f: Callable[[T], Any]) -> Callable[[T], Any]:
        def run(x: T) -> Any:
            out = f(x)
            return vars(out) if shape == "dataclass" else out

        return run

    torch.manual_seed(0)
    model = Shaped().train()
    f = compiled(model, budget=0)
    assert_same(step(flat(f), (x,), model), step(flat(model), (x,), model), 0.0)
    with torch.no_grad():
        assert type(f(x)) is type(model(x))


def test_one_of_two_outputs_is_differentiated(x: T) -> None:
    class Two(Mlp):
        def forward(self, x: T) -> Any:
            h = super().forward(x)
            return h.square().mean(), torch.sin(h).sum(-1)

    torch.manual_seed(0)
    model = Two().train()
    f = compiled(model, budget=0)
    for k in range(2):
        found, expected = (step(lambda x, g=g, k=k: g(x)[k], (x,), model) for g in (f, model))
        assert_same(found, expected, 0.0)
