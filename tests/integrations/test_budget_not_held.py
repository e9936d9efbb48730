"""Budgets that cannot be held: refused before the first step, run at the least peak at a later recompilation."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetWarning
from remat.units import format_bytes


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def steps(budget: Any, lower: str, *batches: int, **options: Any) -> list[str]:
    """Run a step of each batch size; return the warnings about the budget."""
    torch._dynamo.reset()
    model, plainly = net(), net()
    options = {"budget": budget, "lower": lower, **options}
    compiled = torch.compile(model, backend="remat", dynamic=False, options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BudgetWarning)
        for batch in batches:
            x = torch.randn(batch, 64)
            for module, run in ((model, compiled), (plainly, plainly)):
                module.zero_grad()
                run(x).sum().backward()
            for one, other in zip(model.parameters(), plainly.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-4)
    return [str(w.message) for w in caught if w.category is BudgetWarning]


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_longer_batch_in_the_middle_of_training_runs_at_the_least_peak(lower: str) -> None:
    (warned,) = steps("500KiB", lower, 64, 512, 512)
    assert "compiled again, and its budget cannot be held: budget" in warned
    least = remat.plans()[-1].peak_bytes
    assert f"runs instead, which takes {format_bytes(least)} ({least} bytes)" in warned
    steps(remat.Peak(0.0), lower, 512)
    assert least <= 1.05 * remat.plans()[-1].peak_bytes


def test_what_takes_far_more_than_was_warned_of_is_warned_of_again() -> None:
    first, second = steps("500KiB", "eager", 64, 512, 520, 1024, 960)
    figures = [
        int(re.findall(r"which takes .*\((\d+) bytes\)", text)[0]) for text in (first, second)
    ]
    assert 1.1 * figures[0] < figures[1]


@pytest.mark.parametrize("same", [True, False])
def test_an_output_that_is_still_held_hides_no_excess(same: bool) -> None:
    """As the loss of the last step is, which a loop holds until the next step returns."""
    torch._dynamo.reset()
    options = {"budget": "500KiB", "lower": "eager"}
    first = torch.compile(net(), backend="remat", dynamic=False, options=options)
    wider = nn.Sequential(net(), nn.Tanh())
    then = first if same else torch.compile(wider, backend="remat", options=options)
    held = first(torch.randn(64, 64))
    held.sum().backward()
    with pytest.warns(BudgetWarning, match="and its budget cannot be held: budget"):
        then(torch.randn(512, 64)).sum().backward()
    assert held.numel()


def test_the_first_step_refuses_and_names_a_budget_that_is_held() -> None:
    with pytest.raises(Exception, match=r"(?s)BudgetError.*give budget=") as raised:
        steps("500KiB", "eager", 512)
    named = str(raised.value).split("give budget=")[1].split()[0].rstrip(".")
    assert steps(int(named), "eager", 512) == []
    assert remat.plans()[-1].peak_bytes <= int(named)


def test_strict_options_refuse_later_too() -> None:
    with pytest.raises(Exception, match=r"(?s)BudgetError.*budget"):
        steps("500KiB", "eager", 64, 512, strict=True)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_strict_is_a_truth_value(value: Any) -> None:
    with pytest.raises(remat.RematError, match=r"strict is .*; expected False"):
        remat.partitioner(0.5, strict=value)
