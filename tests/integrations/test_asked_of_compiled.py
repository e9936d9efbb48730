"""What is asked of a compiled step: the default by its name, and peaks that nothing can hold."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import remat
from remat.errors import BudgetWarning
from remat.integrations.budget_loop import warn_of_saved
from remat.integrations.partitioner import Partitioner
from remat.units import format_bytes


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.tanh(x @ w) @ w).sum()


def test_the_default_cost_model_by_its_name_is_the_default() -> None:
    left_out, named = Partitioner(budget=0.5), Partitioner(budget=0.5, cost="auto")
    assert named.request.cost == left_out.request.cost
    assert str(named.request.cost) == "auto"


def test_a_peak_below_parameters_and_inputs_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("remat.integrations.budget_loop.compile_graph", compiled)
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    torch.compiler.reset()
    budget = remat.Peak(2 * 64 * 64 * 4 - 1)
    with pytest.raises(Exception, match=r"parameters and inputs alone take 32 KiB \(32768 bytes\)"):
        torch.compile(step, backend="remat", options={"budget": budget})(x, w)


def test_plans_say_their_peak_as_compiled_and_saved_ones_that_it_is_above_their_budget() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)

    def compiled(**options: Any) -> remat.Plan:
        torch.compiler.reset()
        torch.compile(step, backend="remat", options=options)(x, w).backward()
        return remat.plans()[-1]

    plan = compiled(budget=remat.Peak("1MiB"))
    assert f"peak {format_bytes(plan.peak_bytes)} as compiled" in repr(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        compiled(plan=plan)
    # One that was simulated within its budget, and is above it as Inductor lays values out.
    less = replace(plan, budget=f"peak:{plan.peak_bytes - 1}", _asked=None)
    with pytest.warns(BudgetWarning, match=r"as Inductor compiled it by a saved plan, above"):
        warn_of_saved(less)


def test_a_step_that_was_found_in_a_cache_gives_a_plan_that_has_a_key_of_its_own() -> None:
    """What makes the modules of a restored plan anew can be pickled, as AOTAutograd's key asks for."""
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        torch.compiler.reset()
        torch.compile(step, backend="remat", options={"budget": 0.25})(x, w).backward()
    restored = Partitioner(plan=remat.plans()[-1])
    assert pickle.loads(pickle.dumps(restored)).uuid() == restored.uuid()
