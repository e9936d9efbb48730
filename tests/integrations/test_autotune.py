"""Several plans compiled and timed: the fastest stays, is remembered, and changes no gradient."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remat
from remat.errors import ProblemError
from remat.integrations import autotune
from tests.models import build


class Block(nn.Module):
    """Has all that tuning must leave alone: draws, statistics that a step updates, and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.3)
        return self.last(hidden.sin()).square()


def stepped(model: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model(x).sum().backward()
    after = torch.rand(3)
    return [*(p.grad for p in module.parameters() if p.grad is not None), *module.buffers(), after]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Few rounds, and a folder of its own."""
    monkeypatch.setattr(autotune, "_ROUNDS", (2, 2))
    monkeypatch.setattr("remat.torch_compat.cache_dir", lambda: str(tmp_path), raising=False)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("budget", [0.3, remat.Peak(0.5)], ids=str)
def test_tuning_leaves_the_step_as_it_was(budget: Any) -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(16, 32)
    alone = copy.deepcopy(model)
    plain = torch.compile(
        alone, backend="remat", options={"budget": budget, "fallback_random": True}
    )
    expected = stepped(plain, alone, x)
    known = len(remat.plans())
    options = {"budget": budget, "autotune": 2, "fallback_random": True}
    tuned = torch.compile(model, backend="remat", options=options)
    for a, b in zip(stepped(tuned, model, x), expected, strict=True):
        torch.testing.assert_close(a, b)
    (plan,) = remat.plans()[known:]
    alone_left = "as asked; nothing was compared: "
    assert "the fastest of 2 different plans as measured" in plan.tuned or plan.tuned.startswith(
        alone_left
    )
    assert f"chosen        {plan.tuned}" in plan.explain()


@pytest.mark.usefixtures("quick")
def test_what_a_step_changes_while_it_is_timed_nobody_sees() -> None:
    """Weights that it shrinks, buffers that it counts in; inputs that share memory, or that cannot be written."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    count, whole = torch.zeros(()), torch.arange(8.0)
    spread = torch.tensor(float("nan")).expand(4, 4)
    inputs = [weight, count, whole[:4], whole[2:6], spread]
    before = [(v.detach().clone(), v._version) for v in inputs]
    ran: list[float] = []

    def step(*given: torch.Tensor) -> torch.Tensor:
        own, counted, left, right, many = given
        with torch.no_grad():
            own.mul_(0.9)
            counted.add_(1)
            left.add_(1)
            ran.append(float(right[0] - left[2]))
        own = own * (random.random() + np.random.rand())
        return (own * torch.rand(4, 4)).sum() + torch.nan_to_num(many).sum()

    def packed(value: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a hook of the user's was called")

    state, others = torch.get_rng_state(), (random.getstate(), str(np.random.get_state()))
    with torch.autograd.graph.saved_tensors_hooks(packed, packed):
        found = autotune._timed({"a": step, "b": step}, inputs)
    assert others == (random.getstate(), str(np.random.get_state()))
    assert set(found) == {"a", "b"}
    assert len(ran) == 6
    assert set(ran) == {0.0}, "copies share memory as the inputs do"
    assert torch.equal(torch.get_rng_state(), state)
    assert weight.grad is None
    for value, (content, version) in zip(inputs, before, strict=True):
        torch.testing.assert_close(value.detach(), content, equal_nan=True)
        assert value._version == version


@pytest.mark.usefixtures("quick")
def test_the_fastest_is_kept_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[list[str]] = []

    def as_if(steps: Any, inputs: Any) -> dict[str, tuple[float, float]]:
        timed.append(list(steps))
        return {name: (1.0 / (k + 1), 2.0) for k, name in enumerate(steps)}

    monkeypatch.setattr(autotune, "_timed", as_if)
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        step = build("gpt2")
        compiled: Any = torch.compile(
            step.model, backend="remat", options={"budget": 0.4, "autotune": 2}
        )
        compiled(*step.args, **step.kwargs).loss.backward()
    (names,) = timed
    assert len(names) > 1
    assert remat.plans()[-1].tuned.startswith(
        f"{names[-1]}, the fastest of {len(names)} different plans as measured"
    )
    assert "(median 2000.0)" in remat.plans()[-1].tuned
    assert "remembered from another run" in remat.plans()[-1].tuned

    # What is remembered is taken while it can be compiled within the budget.
    def over(*args: Any, **kwargs: Any) -> Any:
        raise remat.errors.BudgetError("too much")

    monkeypatch.setattr("remat.passes.decide.torch_partition.TorchPartition.decide", over)
    torch._dynamo.reset()
    step = build("gpt2")
    compiled = torch.compile(step.model, backend="remat", options={"budget": 0.4, "autotune": 2})
    compiled(*step.args, **step.kwargs).loss.backward()
    assert remat.plans()[-1].tuned == (
        "as asked; nothing was compared: 'PyTorch's decision' could not be compiled: too much"
    )


@pytest.mark.usefixtures("quick")
def test_what_goes_over_its_budget_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def over(*args: Any, **kwargs: Any) -> Any:
        raise remat.errors.BudgetError("too much")

    monkeypatch.setattr("remat.passes.decide.torch_partition.TorchPartition.decide", over)
    model = Block()
    compiled = torch.compile(model, backend="remat", options={"budget": 0.2, "autotune": 2})
    with caplog.at_level(logging.INFO, "remat"):
        compiled(torch.randn(16, 32)).sum().backward()
    assert "'PyTorch's decision' is left out" in caplog.text
    assert remat.plans()[-1].tuned.startswith("as asked; nothing was compared: ")


@pytest.mark.parametrize("given", [0, 5, True, 2.0, "4"])
def test_a_number_that_cannot_be_meant_is_refused(given: Any) -> None:
    with pytest.raises(ProblemError, match="from 1 to 4"):
        autotune.asked(given, {}, None)


def test_it_does_not_go_together_with_a_plan_and_max_autotune_asks_for_it() -> None:
    with pytest.raises(ProblemError, match="'pipeline' says which to take"):
        autotune.asked(2, {"pipeline": "dce"}, None)
    assert autotune.asked(None, {}, "max-autotune") == 4
    assert autotune.asked(None, {"plan": "p.json"}, "max-autotune") == 1
    assert autotune.asked(None, {}, None) == 1
