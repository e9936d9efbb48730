"""`backend="remat"` plans a training step that is one graph, and an inference whose peak exceeds the budget."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning

X = torch.linspace(-1, 1, 512 * 32).reshape(512, 32)


@pytest.fixture
def model() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.25), nn.Linear(128, 32))
        for _ in range(3)
    )
    return nn.Sequential(*blocks)


def step_of(model: nn.Module, by: str) -> Any:
    def step(x: torch.Tensor) -> Any:
        if by == "func":
            loss = lambda p: torch.func.functional_call(model, p, (x,)).square().mean()  # noqa: E731
            return torch.func.grad(loss)(constants)
        loss = model(x).square().mean()
        if by == "backward":
            loss.backward()
            return loss.detach()
        gradients = torch.autograd.grad(loss, parameters)
        if by == "sgd":
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.1)
            return loss.detach()
        return loss.detach(), gradients

    parameters = [*model.parameters()]
    constants = {name: p.detach() for name, p in model.named_parameters()}
    return step


def after_steps(model: nn.Module, compiled: Any, steps: int = 2) -> list[torch.Tensor]:
    """Results of some steps, parameters, gradients, and the next random number; the model is as before afterwards."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(1)
    with torch_compat.dynamo_config.patch(trace_autograd_ops=True):
        made = [compiled(X) for _ in range(steps)]
    found = [
        *torch.utils._pytree.tree_leaves(made),
        *(p.detach().clone() for p in model.parameters()),
    ]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    model.load_state_dict(before)
    model.zero_grad()
    return [*found, torch.rand(1)]


@pytest.mark.parametrize("by", ["backward", "grad", "sgd", "func"])
@pytest.mark.parametrize("budget", [remat.Peak(0.25), 0.25])
def test_a_step_that_runs_backward_itself_is_planned(
    model: nn.Module, by: str, budget: Any
) -> None:
    step = step_of(model, by)
    expected = after_steps(model, torch.compile(step, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    options = {"budget": budget, "lower": "eager"}
    before = len(remat.plans())
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        compiled = torch.compile(step, backend="remat", options=options, fullgraph=True)
        found = after_steps(model, compiled)
    assert all(map(torch.equal, expected, found))
    plans = remat.plans()[before:]
    assert plans
    assert all(p.recompute_cost > 0 for p in plans)
    assert "Sequential" in plans[-1].explain()


def test_inductor_holds_the_peak_of_a_whole_step(model: nn.Module) -> None:
    step = step_of(model, "sgd")
    expected = after_steps(model, torch.compile(step, fullgraph=True), steps=1)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="remat", options={"budget": "2.5MiB"}, fullgraph=True)
    found = after_steps(model, compiled, steps=1)
    plan = remat.plans()[-1]
    assert plan.peak_bytes <= 2.5 * 2**20 < plan.before_after.without_peak_bytes
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_checkpointed_region_of_a_whole_step_may_draw_random_numbers(model: nn.Module) -> None:
    parameters = [*model.parameters()]

    def step(x: torch.Tensor) -> Any:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        loss = x.square().mean()
        return loss.detach(), torch.autograd.grad(loss, parameters)

    expected = after_steps(model, step)
    options = {"budget": 1.0, "lower": "eager"}
    found = after_steps(
        model, torch.compile(step, backend="remat", options=options, fullgraph=True)
    )
    assert all(map(torch.equal, expected, found))
    assert remat.plans()[-1].recompute_cost > 0


def test_inductor_rounds_a_whole_step_that_branches_on_16_bits_as_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    weight = torch.eye(8, dtype=torch.bfloat16, requires_grad=True)

    def step(x: torch.Tensor) -> Any:
        scores = torch.tanh(x @ weight)
        loss = scores.gather(1, scores.topk(2, dim=1).indices).float().square().mean()
        return loss.detach(), torch.autograd.grad(loss, [weight])

    compiled = torch.compile(step, backend="remat", options={"budget": 0.5}, fullgraph=True)
    with (
        torch_compat.dynamo_config.patch(trace_autograd_ops=True),
        torch_compat.functorch_config.patch(enable_autograd_cache=False),
        caplog.at_level("INFO", logger="remat"),
    ):
        compiled(X[:16, :8].bfloat16())
    assert "branch on numbers of 16 bits" in caplog.text


def test_a_whole_step_is_not_checked_and_a_warning_says_so(model: nn.Module) -> None:
    step = step_of(model, "grad")
    options = {"budget": 0.25, "lower": "eager", "check": "recomputed"}
    with pytest.warns(
        BudgetWarning, match="does not check 'Sequential 0/0', whose step is one graph"
    ):
        found = after_steps(model, torch.compile(step, backend="remat", options=options))
    torch._dynamo.reset()
    expected = after_steps(model, torch.compile(step, backend="aot_eager"))
    assert all(map(torch.equal, expected, found))


def test_a_whole_step_that_cannot_hold_its_peak_is_refused(model: nn.Module) -> None:
    step = step_of(model, "grad")
    compiled = torch.compile(step, backend="remat", options={"budget": "1KiB", "lower": "eager"})
    with (
        torch_compat.dynamo_config.patch(trace_autograd_ops=True),
        pytest.raises(BudgetError, match="infeasible"),
    ):
        compiled(X)


class Skipping(nn.Module):
    """Adds its first values, which are wide, to its last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [torch.cat([x * k] * 8) for k in range(6)]
        for _ in range(4):
            x = torch.tanh(x)
        for value in kept:
            x = x + value.sum() * value[: len(x)]
        return x


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_an_inference_is_planned_if_its_peak_exceeds_the_budget(lower: str) -> None:
    torch._dynamo.reset()
    model = Skipping()
    before = len(remat.plans())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        enough = torch.compile(model, backend="remat", options={"budget": "1GiB", "lower": lower})
        expected = enough(X)
        assert len(remat.plans()) == before
        torch._dynamo.reset()
        little = torch.compile(model, backend="remat", options={"budget": "1.5MiB", "lower": lower})
        torch.testing.assert_close(little(X), expected)
    (plan,) = remat.plans()[before:]
    assert plan.peak_bytes <= 1.5 * 2**20


# From PyTorch 2.15 on, a warning says for which size the budget holds.
@pytest.mark.filterwarnings("ignore:.*holds its budget:remat.errors.BudgetWarning")
def test_an_inference_whose_sizes_depend_on_data_is_planned() -> None:
    torch._dynamo.reset()

    def infer(x: torch.Tensor) -> Any:
        found = x.nonzero()
        return Skipping()(x) + found.sum(), found

    compiled = torch.compile(infer, backend="remat", options={"budget": "1.5MiB", "lower": "eager"})
    with torch.no_grad(), torch_compat.dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        assert all(map(torch.equal, compiled(X), infer(X)))


def test_an_inference_runs_by_its_saved_plan() -> None:
    def plan_of(options: dict[str, Any]) -> Any:
        torch._dynamo.reset()
        before = len(remat.plans())
        compiled = torch.compile(Skipping(), backend="remat", options=options | {"lower": "eager"})
        with torch.no_grad():
            compiled(X)
        return [*remat.plans()[before:]]

    (plan,) = plan_of({"budget": "1.5MiB"})
    saved = remat.Plan.from_json(plan.to_json())
    for budget in ({}, {"budget": "1GiB"}):
        (again,) = plan_of({"plan": saved} | budget)
        assert again.peak_bytes == plan.peak_bytes
    (other,) = plan_of({"budget": "1MiB"})
    assert other.peak_bytes < plan.peak_bytes


def test_an_inference_that_cannot_hold_its_peak_warns_or_with_strict_is_refused() -> None:
    torch._dynamo.reset()
    options = {"budget": "100KiB", "lower": "eager"}
    with torch.no_grad():
        compiled = torch.compile(Skipping(), backend="remat", options=options)
        with pytest.warns(BudgetWarning, match="has no backward, and its budget cannot be held"):
            compiled(X)
        torch._dynamo.reset()
        compiled = torch.compile(Skipping(), backend="remat", options=options | {"strict": True})
        with pytest.raises(BudgetError, match="infeasible"):
            compiled(X)
