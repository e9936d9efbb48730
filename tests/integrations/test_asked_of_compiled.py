"""What is asked of a compiled step: the default by its name, and peaks that nothing can hold."""

from __future__ import annotations

import pytest
import torch

import remat
from remat.integrations.partitioner import Partitioner
from remat.units import format_bytes


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.tanh(x @ w) @ w).sum()


def test_the_default_cost_model_by_its_name_is_the_default() -> None:
    left_out, named = Partitioner(budget=0.5), Partitioner(budget=0.5, cost="auto")
    assert named.request.cost == left_out.request.cost
    assert str(named.request.cost) == "auto:tensors"


def test_a_peak_below_parameters_and_inputs_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("remat.integrations.torch_compile._compile_as_planned", compiled)
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    torch.compiler.reset()
    budget = remat.Peak(2 * 64 * 64 * 4 - 1)
    with pytest.raises(Exception, match=r"parameters and inputs alone take 32 KiB \(32768 bytes\)"):
        torch.compile(step, backend="remat", options={"budget": budget})(x, w)


def test_a_plan_in_one_line_says_the_compiled_peak() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    torch.compiler.reset()
    torch.compile(step, backend="remat", options={"budget": 0.5})(x, w).backward()
    plan = remat.plans()[-1]
    assert f"peak {format_bytes(plan.peak_bytes)} as compiled" in repr(plan)
