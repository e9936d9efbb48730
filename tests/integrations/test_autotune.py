"""Several plans compiled and timed: the fastest stays, is remembered, and changes no gradient."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import remat
from benchmarks.models import build
from remat.errors import ProblemError
from remat.integrations import autotune


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
    assert "the fastest of 2 as measured" in plan.tuned or plan.tuned == "as asked"
    if plan.tuned != "as asked":
        assert f"chosen      {plan.tuned}" in plan.explain()


class Shrinking(nn.Module):
    """Changes a weight, an input and a buffer in each step; another input may not be written at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
            self.count.add_(1)
            y.add_(1)
        x = x + torch.nan_to_num(spread)
        for layer in self.layers:
            x = nn.functional.layer_norm(nn.functional.gelu(layer(x)) * torch.sigmoid(x), (32,))
        return x * y


@pytest.mark.usefixtures("quick")
def test_what_a_step_changes_is_changed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Shrinking(), torch.randn(16, 32)
    expected = copy.deepcopy(model)
    ran = []
    timed = autotune._timed
    monkeypatch.setattr(autotune, "_timed", lambda *given: ran.append(timed(*given)) or ran[-1])
    tuned = torch.compile(model, backend="remat", options={"budget": 0.3, "autotune": 2})
    ys, spread = [torch.zeros(32), torch.zeros(32)], torch.tensor(float("nan")).expand(16, 32)
    for step, y in ((expected, ys[0]), (tuned, ys[1])):
        step(x, y, spread).square().sum().backward()
    assert len(ran[0]) == 2, "both plans ran"
    assert ys[1]._version == 1
    for a, b in zip(ys[1:], ys[:1], strict=True):
        torch.testing.assert_close(a, b)
    for (name, mine), theirs in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, msg=name)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quick")
def test_the_fastest_is_kept_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[list[str]] = []

    def as_if(steps: Any, inputs: Any) -> dict[str, float]:
        timed.append(list(steps))
        return {name: 1.0 / (k + 1) for k, name in enumerate(steps)}

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
        f"{names[-1]}, the fastest of {len(names)} as measured"
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
    assert remat.plans()[-1].tuned == "as asked"


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
