"""``check="recomputed"``: backward compares what it computes again with what forward computed."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import fx

import remat
from remat.errors import BudgetWarning, ProblemError, RecomputeError
from remat.integrations import recompute_check

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",
    "ignore::remat.errors.PeakWarning",
    "ignore::remat.errors.BudgetWarning",
)


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = x.argmax(-1)  # of an input alone, so that backward may compute it again
    return (w[rows].sin() * (x @ w).sin().exp()).sum()


def run(**options: Any) -> torch.Tensor:
    torch.compiler.reset()
    torch.manual_seed(0)
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    torch.compile(step, backend="remat", options={"budget": 0, **options})(x, w).backward()
    return torch.cat([x.grad, w.grad])  # type: ignore[list-item]


def breaking(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes backward compute another number for a node."""
    theirs = recompute_check.add_checks

    def add(forward: fx.GraphModule, backward: fx.GraphModule, number: int) -> None:
        theirs(forward, backward, number)
        (again,) = (n for n in backward.graph.nodes if n.name == name)
        if name == "argmax":
            again.target = torch.ops.aten.argmin.default
        else:
            again.target = torch.ops.aten.cos.default
        backward.recompile()

    monkeypatch.setattr("remat.integrations.stages.add_checks", add)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_equal_values_pass_and_the_gradient_stays(
    lower: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(lower=lower)
    with caplog.at_level(logging.INFO, "remat"):
        found = run(lower=lower, check="recomputed")
    assert torch.equal(found, expected)
    assert any("recomputed values are forward's, bit for bit" in r.message for r in caplog.records)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_branch_value_that_differs_is_named_with_its_line(
    lower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, "argmax")
    with pytest.raises(
        RecomputeError, match=r"8 of 8 elements of a branch value differ.*argmax"
    ) as e:
        run(lower=lower, check="recomputed")
    assert "rows = x.argmax(-1)" in str(e.value)


def test_other_values_that_differ_are_logged_with_the_largest_difference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    breaking(monkeypatch, "sin_1")
    with caplog.at_level(logging.WARNING, "remat"):
        run(lower="eager", check="recomputed")
    (first, *_) = (r.message for r in caplog.records if "recomputed otherwise" in r.message)
    assert "by up to" in first
    assert "test_recompute_check.py" in first
    (verdict,) = (r.message for r in caplog.records if "bit for bit" in r.message)
    assert re.match(r"\d+ of \d+ recomputed values are forward's", verdict)
    assert "No branch value differs" in verdict


@pytest.mark.parametrize("budget", ["peak:0.5", "1GiB"])
def test_a_budget_that_the_check_does_not_hold_is_warned_of(budget: str) -> None:
    with pytest.warns(BudgetWarning, match="check='recomputed' holds no budget in bytes"):
        run(budget=budget, check="recomputed", lower="eager")


def test_the_plan_has_no_checks() -> None:
    run(lower="eager", check="recomputed")
    graphs = (remat.plans()[-1].forward.graph, remat.plans()[-1].backward.graph)
    assert not any("compare_again" in str(n.target) for g in graphs for n in g.nodes)


def test_another_word_is_refused() -> None:
    with pytest.raises(ProblemError, match="check is 'all'; expected None or 'recomputed'"):
        remat.backend(check="all")  # type: ignore[arg-type]
