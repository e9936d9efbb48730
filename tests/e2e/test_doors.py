"""The doors into torch.compile: what users switch on around a model works as it does without us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.e2e.doors import Mlp, Model, NewPlans, assert_same, compiled, gradients, run

# Importing Inductor imports a deprecated corner of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def test_autocast(mlp: Mlp, x: torch.Tensor, new_plans: NewPlans) -> None:
    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                loss = f(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    reference = run(mlp, stepper(mlp))
    at = {}
    for budget in (1, 0.5, 0):
        torch._dynamo.reset()
        at[budget] = run(mlp, stepper(compiled(mlp, budget)))
        assert_same(at[budget], at[1])
    assert len(new_plans()) == 3
    assert new_plans()[-1].recomputed
    for mine, theirs in zip(at[0], reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-3)


def test_no_grad_and_frozen_models_are_not_planned(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    f = compiled(mlp)
    with torch.no_grad():
        assert_same(run(mlp, lambda: f(x)), run(mlp, lambda: mlp(x)))
    mlp.requires_grad_(False)
    assert_same(run(mlp, lambda: f(x)), run(mlp, lambda: mlp(x)))
    mlp.eval()
    assert_same(run(mlp, lambda: f(x)), run(mlp, lambda: mlp(x)))
    assert new_plans() == ()


def test_eval_with_gradients_is_planned_without_dropout(
    mlp: Mlp, x: torch.Tensor, new_plans: NewPlans
) -> None:
    mlp.eval()
    f = compiled(mlp)
    assert_same(run(mlp, lambda: f(x).sum().backward()), run(mlp, lambda: mlp(x).sum().backward()))
    (plan,) = new_plans()
    assert not any("dropout" in name for name in plan.recomputed)


def test_gradients_accumulate_over_steps(mlp: Mlp, x: torch.Tensor) -> None:
    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> None:
            for k in (1, 2):
                (f(x * k).square().mean() / 2).backward()

        return step

    assert_same(run(mlp, stepper(compiled(mlp))), run(mlp, stepper(mlp)))


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_backward_twice_through_one_forward(mlp: Mlp, x: torch.Tensor, budget: float) -> None:
    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> Any:
            loss = f(x).square().mean()
            loss.backward(retain_graph=True)
            once = [g for g in gradients(mlp) if g is not None]
            loss.backward()
            return once

        return step

    assert_same(run(mlp, stepper(compiled(mlp, budget))), run(mlp, stepper(mlp)))


def test_two_losses_backward_one_after_the_other() -> None:
    class Two(Mlp):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            h = super().forward(x)
            return h.square().mean(), torch.sin(h).sum(-1)

    torch.manual_seed(0)
    model, x = Two().train(), torch.randn(128, 64)

    def stepper(f: Model, which: str) -> Callable[[], Any]:
        def step() -> None:
            first, second = f(x)
            if which == "sum":
                (first + 2 * second.mean()).backward()
            elif which == "one":
                second.sum().backward()
            else:
                first.backward(retain_graph=True)
                second.sum().backward()

        return step

    for which in ("sum", "one", "in turn"):
        torch._dynamo.reset()
        f = compiled(model)
        assert_same(run(model, stepper(f, which)), run(model, stepper(model, which)))


@dataclass
class Answer:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Pair(NamedTuple):
    a: torch.Tensor
    b: list[torch.Tensor | int | None]


@pytest.mark.parametrize("shape", ["dict", "dataclass", "nested"])
def test_outputs_of_any_shape(shape: str, x: torch.Tensor) -> None:
    class Shaped(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            h = super().forward(x)
            if shape == "dict":
                return {"h": h, "view": h[:2].T, "input": x, "n": 3}
            if shape == "dataclass":
                return Answer(hidden=h, extra={"mean": h.mean(), "none": None})
            return Pair(h, [h.detach() * 2, 7, None, (h + 1).sum(0)]), {"deep": [(h.cos(),)]}

    torch.manual_seed(0)
    model = Shaped().train()

    def flat(out: Any) -> list[Any]:
        if isinstance(out, Answer):
            out = (out.hidden, out.extra)
        return torch.utils._pytree.tree_leaves(out)

    def stepper(f: Model) -> Callable[[], Any]:
        def step() -> Any:
            leaves = flat(f(x))
            tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
            torch.stack([v.sum() for v in tensors if v.requires_grad]).sum().backward()
            return [v.detach() if isinstance(v, torch.Tensor) else v for v in leaves]

        return step

    assert_same(run(model, stepper(compiled(model))), run(model, stepper(model)))
    with torch.no_grad():
        assert type(compiled(model)(x)) is type(model(x))


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_dynamic_shapes(mlp: Mlp, budget: float, new_plans: NewPlans) -> None:
    f = torch.compile(
        mlp, backend="remat", options={"budget": budget, "lower": "eager"}, dynamic=True
    )

    def stepper(f: Model, x: torch.Tensor) -> Callable[[], Any]:
        def step() -> Any:
            loss = f(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    for rows in (128, 96, 33):
        x = torch.randn(rows, 64)
        assert_same(run(mlp, stepper(f, x)), run(mlp, stepper(mlp, x)))
    assert len(new_plans()) == 1, "one plan serves all sizes"


# Dynamo looks at .grad of what crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_graph_breaks_give_a_plan_for_each_graph(x: torch.Tensor, new_plans: NewPlans) -> None:
    class Broken(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(0)
    model = Broken().train()
    f = compiled(model)
    assert_same(
        run(model, lambda: f(x).square().mean().backward()),
        run(model, lambda: model(x).square().mean().backward()),
    )
    assert len(new_plans()) >= 2
    assert len({p.fingerprint for p in new_plans()}) >= 2


@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_an_output_edited_in_place_is_never_silently_wrong(budget: float) -> None:
    """Outputs are free to save; who edits one that was saved hears of it from autograd."""

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))  # backward of tanh reads its result

    model = Saved()
    x = torch.randn(8, 64)

    def edit(f: Model) -> Callable[[], Any]:
        def step() -> None:
            out = f(x)
            loss = out.sum()
            with torch.no_grad():
                out.mul_(2)
            loss.backward()

        return step

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edit(model)()
    try:
        edited = run(model, edit(compiled(model, budget)))
    except RuntimeError as error:
        told = str(
            error
        )  # autograd's words, or ours where the step returned another tensor on the same memory
        assert "modified by an inplace operation" in told or "was written to" in told
    else:
        assert_same(edited, run(model, lambda: model(x).sum().backward()))


@pytest.mark.parametrize("budget", [0, 0.3, 1])
def test_inputs_that_are_mutated_or_returned(budget: float) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = torch.cos(x)
        y = torch.sin(c @ w) @ torch.sigmoid(c)  # reads x as it was before the next line
        x.mul_(0.5)
        return y.tanh(), x, w.T, y[1:]

    def step(f: Model) -> list[Any]:
        torch.manual_seed(0)
        x, w = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
        out = f(x, w)
        (out[0].sum() + out[3].square().sum() + out[2].sum()).backward()
        return [x, w.grad, *(v.detach() for v in out)]

    assert_same(step(compiled(f, budget)), step(f))
